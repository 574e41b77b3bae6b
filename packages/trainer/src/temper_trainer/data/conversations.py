"""Tokenize multi-turn conversations as demonstrations; only the assistant's turns are trained."""

from collections.abc import Mapping, Sequence

import jinja2
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DataConfig
from temper_trainer.data.loss_weights import check_any_weight
from temper_trainer.data.rows import ChatMessage, DataError, Row
from temper_trainer.types import Demonstration, Prompt


def encode_conversation(
    row: Row, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Demonstration:
    """Tokenize one conversation turn by turn, as it would have been sampled.

    Each assistant turn (with data.train_on last only the last one) is trained from its first token
    to its end token. Text that the template writes after the end token is not trained. A turn's
    tokens have its message's weight, if the row has weights.

    Raises:
        ConfigError: If there is no chat template, or data.tools_path is set.
        DataError: If the template rewrites earlier turns when later ones follow, so that no mask is
            correct, or if all trained turns have weight 0.
    """
    assert isinstance(row.prompt, tuple)
    template = _choose_template(row, tokenizer, config)
    messages = row.prompt
    trained_turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    trained_turns = trained_turns[-1:] if config.train_on == "last" else trained_turns
    tokens: list[int] = []
    trained: list[bool] = []
    weights: list[float] = []
    rendered = ""
    for i in trained_turns:
        context_text, completed_text = (
            render_messages(
                messages[:end],
                tokenizer,
                template=template,
                opens_turn=opens_turn,
                location=row.location,
            )
            for end, opens_turn in ((i, True), (i + 1, False))
        )
        if not context_text.startswith(rendered) or not completed_text.startswith(context_text):
            raise DataError(
                f"{row.location}: the chat template rewrites turn {i} when another follows, so "
                "trained and untrained tokens cannot be separated: set data.train_on=last, or "
                "another data.chat_template."
            )
        # In pieces: a sampled completion starts a new token, while the tokenizer could merge
        # characters across the border.
        context = _tokenize(context_text[len(rendered) :], tokenizer)
        completion = _tokenize(completed_text[len(context_text) :], tokenizer)
        tokens += context + completion
        trained += [False] * len(context) + _mask_until_end(completion, tokenizer)
        weight = row.loss_weights[i] if isinstance(row.loss_weights, tuple) else 1.0
        weights += [0.0] * len(context) + [weight] * len(completion)
        rendered = completed_text
    check_any_weight(weights, location=row.location)
    # The prompt ends before the first turn that train_on selects, also if its weight is 0: limits
    # on prompts must not depend on weights.
    first = trained.index(True)
    if first == 0:
        raise DataError(
            f"{row.location}: the conversation starts with an assistant turn, so there is no "
            "prompt: remove the row."
        )
    prompt = Prompt(
        prompt_id=row.row_id,
        text=tokenizer.decode(tokens[:first]),
        tokens=tuple(tokens[:first]),
        answer="",
        difficulty=row.difficulty,
        location=row.location,
    )
    return Demonstration(
        prompt=prompt,
        tokens=tuple(tokens[first:]),
        loss_mask=tuple(trained[first:]),
        loss_weights=None if row.loss_weights is None else tuple(weights[first:]),
    )


def _choose_template(row: Row, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    template: str | None = config.chat_template or tokenizer.chat_template
    if template is None:
        raise ConfigError(
            f"{row.location} is a list of chat messages, but the tokenizer has no chat template: "
            "set data.chat_template."
        )
    if config.tools_path is not None:
        raise ConfigError(
            "data.tools_path has no effect on conversations, whose system message describes the "
            "tools: remove it."
        )
    return template


def render_messages(
    messages: Sequence[ChatMessage],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    opens_turn: bool,
    location: str,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """Return the text of chat messages in a chat template.

    Args:
        messages: The messages.
        tokenizer: Gives the template its special tokens.
        template: Jinja chat template.
        opens_turn: True to open the assistant's turn at the end.
        location: Row of the messages, for errors.
        tools: Schemas of the tools that the template describes.

    Raises:
        DataError: If the template cannot render the messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            tools=None if tools is None else [dict(schema) for schema in tools],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=opens_turn,
        )
    except jinja2.TemplateError as error:
        raise DataError(
            f"{location}: the chat template cannot render the messages: {error}. Correct the row, "
            "or set data.chat_template."
        ) from error
    assert isinstance(text, str)
    return text


def _tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _mask_until_end(completion: list[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Return True up to the first end token, inclusive; everywhere if there is no end token."""
    end = tokenizer.eos_token_id
    last = completion.index(end) if end in completion else len(completion) - 1
    return [i <= last for i in range(len(completion))]
