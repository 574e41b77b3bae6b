"""Conversations of several turns as demonstrations: what the assistant said is trained, what others said is not."""

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DataConfig
from temper_trainer.data.rows import ChatMessage, DataError, Row
from temper_trainer.types import Demonstration, Prompt


def encode_conversation(
    row: Row, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Demonstration:
    """One conversation in tokens, turn by turn, as it would have been sampled: each turn is tokenised alone and laid after the last.

    Trained is each assistant turn (with data.train_on last only the last one) from its first token to its end token; what the template
    writes after the end token is not.

    Raises:
        ConfigError: there is no chat template, or data.tools_path is set.
        DataError: the template rewrites earlier turns when later ones follow, so that no mask could be right.
    """
    assert isinstance(row.prompt, tuple)
    template = config.chat_template or tokenizer.chat_template
    if template is None:
        raise ConfigError(
            f"{row.source} is a list of chat messages, but the tokenizer has no chat template: set data.chat_template."
        )
    if config.tools_path is not None:
        raise ConfigError(
            "data.tools_path has no effect on conversations, whose system message says what there is: remove it."
        )
    messages = row.prompt
    wanted = [i for i, message in enumerate(messages) if message.role == "assistant"]
    wanted = wanted[-1:] if config.train_on == "last" else wanted
    tokens: list[int] = []
    trained: list[bool] = []
    done = ""
    for i in wanted:
        before = _render(messages[:i], tokenizer, template=template, opens_turn=True)
        after = _render(messages[: i + 1], tokenizer, template=template, opens_turn=False)
        if not before.startswith(done) or not after.startswith(before):
            raise DataError(
                f"{row.source}: the chat template rewrites turn {i} when another follows, so what was said can't be told from what was "
                "asked: set data.train_on=last, or another data.chat_template."
            )
        asked = _ids(before[len(done) :], tokenizer)
        said = _ids(after[len(before) :], tokenizer)
        tokens += asked + said
        trained += [False] * len(asked) + _until_end(said, tokenizer)
        done = after
    first = trained.index(True)
    if first == 0:
        raise DataError(
            f"{row.source}: the conversation begins with what the assistant says: there is nothing to complete."
        )
    prompt = Prompt(
        prompt_id=row.row_id,
        text=tokenizer.decode(tokens[:first]),
        tokens=tuple(tokens[:first]),
        answer="",
        source=row.source,
    )
    return Demonstration(
        prompt=prompt, tokens=tuple(tokens[first:]), loss_mask=tuple(trained[first:])
    )


def _render(
    messages: tuple[ChatMessage, ...],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    opens_turn: bool,
) -> str:
    plain = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(
        plain, chat_template=template, tokenize=False, add_generation_prompt=opens_turn
    )
    assert isinstance(text, str)
    return text


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def _until_end(said: list[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """True up to the first end token, that one included; all of it where there is none."""
    end = tokenizer.eos_token_id
    last = said.index(end) if end in said else len(said) - 1
    return [i <= last for i in range(len(said))]
