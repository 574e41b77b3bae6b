"""From rows to token ids: prompts to complete, and demonstrations to imitate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DataConfig
from temper_trainer.data.conversations import encode_conversation
from temper_trainer.data.rows import ChatMessage, DataError, PairRow, Row
from temper_trainer.types import Demonstration, Pair, Prompt

_PLACE = "{prompt}"


def encode_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> tuple[list[Prompt], int]:
    """Prompts of the rows in their order, and how many were dropped as longer than ``max_prompt_tokens``.

    Raises:
        DataError: a prompt is too long and overlong_prompts is error, or it has no tokens, or there were rows and none is left.
        ConfigError: chat messages meet a tokenizer without a chat template, or tools one that does not describe them.
    """
    kept = _encode(rows, tokenizer, config)
    return [prompt for _, prompt in kept], len(rows) - len(kept)


def encode_demonstrations(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    must_keep: bool = True,
) -> tuple[list[Demonstration], int]:
    """Prompts with the solution to imitate and the end token after it, and how many rows were dropped for an overlong prompt.

    A conversation is its own demonstration; see ``encode_conversation``. Without ``must_keep`` every row may be dropped.

    Raises:
        DataError: as encode_prompts.
        ConfigError: as encode_prompts.
    """
    if (
        config.train.messages_key is not None
        and rows
        and all(isinstance(row.prompt, tuple) and not row.solution for row in rows)
    ):
        made = [encode_conversation(row, tokenizer, config) for row in rows]
        fitting = [each for each in made if _fits(each.prompt, config=config)]
        if must_keep and not fitting:
            raise _nothing_fits(len(rows), config=config)
        return fitting, len(rows) - len(fitting)
    kept = _encode(rows, tokenizer, config, must_keep=must_keep)
    solutions = (
        tokenizer([row.solution for row, _ in kept], add_special_tokens=False)["input_ids"]
        if kept
        else []
    )
    end = tokenizer.eos_token_id
    demonstrations = [
        Demonstration(prompt=prompt, tokens=(*ids, end))
        for (_, prompt), ids in zip(kept, solutions, strict=True)
    ]
    return demonstrations, len(rows) - len(kept)


def check_fits(demonstrations: Sequence[Demonstration], *, max_tokens: tuple[int, str]) -> None:
    """Refuse the first demonstration that is longer than what a run can train on.

    Args:
        demonstrations: with their prompts.
        max_tokens: the limit, and the key that sets it.

    Raises:
        DataError: naming the row.
    """
    limit, key = max_tokens
    for demonstration in demonstrations:
        length = len(demonstration.prompt.tokens) + len(demonstration.tokens)
        if length > limit:
            raise DataError(
                f"{demonstration.prompt.source}: prompt and solution have {length} tokens, but {key} is {limit}: raise it, or remove "
                "the row."
            )


def render_prompt(row: Row, *, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    """The text that is tokenised: the template around a string, or the chat template over messages with the assistant's turn opened.

    Raises:
        ConfigError: as encode_prompts.
    """
    if isinstance(row.prompt, str):
        # Not str.format: templates and prompts are full of other braces.
        return config.prompt_template.replace(_PLACE, row.prompt)
    template = config.chat_template or tokenizer.chat_template
    if template is None:
        raise ConfigError(
            f"{row.source} is a list of chat messages, but the tokenizer has no chat template: set data.chat_template."
        )
    messages = [{"role": message.role, "content": message.content} for message in row.prompt]
    tools = (
        None
        if config.tools_path is None
        else [dict(schema) for schema in read_tools(config.tools_path)]
    )
    text = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


def _check_tools(
    rows: Sequence[Row],
    texts: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
) -> None:
    """Refuse tools that no prompt would mention."""
    if config.tools_path is None:
        return
    without = replace(config, tools_path=None)
    described = next((i for i, row in enumerate(rows) if not isinstance(row.prompt, str)), None)
    if described is None:
        raise ConfigError(
            "data.tools_path has no effect: no prompt is a list of chat messages. Remove it, or set string_prompts."
        )
    if texts[described] == render_prompt(rows[described], tokenizer=tokenizer, config=without):
        raise ConfigError(
            f"data.tools_path is {config.tools_path!r}, but the chat template says nothing of tools: set a data.chat_template that does."
        )


def _fits(prompt: Prompt, *, config: DataConfig) -> bool:
    """Whether a prompt is short enough; refused where long ones are an error."""
    if len(prompt.tokens) <= config.max_prompt_tokens:
        return True
    if config.overlong_prompts == "drop":
        return False
    raise DataError(
        f"{prompt.source}: the prompt has {len(prompt.tokens)} tokens, but data.max_prompt_tokens is {config.max_prompt_tokens}: "
        "raise it, or set data.overlong_prompts to drop."
    )


def _nothing_fits(num_rows: int, *, config: DataConfig) -> DataError:
    return DataError(
        f"none of {num_rows} prompts fits into data.max_prompt_tokens, which is {config.max_prompt_tokens}: raise it."
    )


def _encode(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    must_keep: bool = True,
) -> list[tuple[Row, Prompt]]:
    """Every row that fits with its prompt."""
    if not rows:
        return []
    if config.string_prompts == "user_message":
        rows = [_as_message(row, config) for row in rows]
    texts = [render_prompt(row, tokenizer=tokenizer, config=config) for row in rows]
    _check_tools(rows, texts, tokenizer=tokenizer, config=config)
    # A chat template writes the special tokens itself; around a plain text the tokenizer puts its own (a begin token, if it has one).
    plain = tokenizer(texts)["input_ids"]
    bare = (
        tokenizer(texts, add_special_tokens=False)["input_ids"]
        if any(not isinstance(row.prompt, str) for row in rows)
        else plain
    )
    kept = []
    for row, text, with_special, without in zip(rows, texts, plain, bare, strict=True):
        ids = _without_end(with_special, tokenizer) if isinstance(row.prompt, str) else without
        if not ids:
            raise DataError(
                f"{row.source}: the prompt {text!r:.80} has no tokens: there is nothing to complete."
            )
        prompt = Prompt(
            prompt_id=row.row_id,
            text=text,
            tokens=tuple(ids),
            answer=row.answer,
            source=row.source,
            extra=row.extra,
            route=row.route,
        )
        if _fits(prompt, config=config):
            kept.append((row, prompt))
    if must_keep and not kept:
        raise _nothing_fits(len(rows), config=config)
    return kept


def _as_message(row: Row, config: DataConfig) -> Row:
    """A string prompt, in its template, as what a user says."""
    if not isinstance(row.prompt, str):
        return row
    content = config.prompt_template.replace(_PLACE, row.prompt)
    return replace(row, prompt=(ChatMessage(role="user", content=content),))


def _without_end(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """A tokenizer that closes every text with its end token (T5's do) would leave nothing to complete."""
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def encode_pairs(
    rows: Sequence[PairRow], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> tuple[list[Pair], int]:
    """Pairs whose prompt fits, and how many were dropped.

    Raises:
        DataError: as encode_demonstrations.
    """
    chosen, num_dropped = encode_demonstrations([row.chosen for row in rows], tokenizer, config)
    rejected, _ = encode_demonstrations([row.rejected for row in rows], tokenizer, config)
    return [
        Pair(chosen=good, rejected=bad) for good, bad in zip(chosen, rejected, strict=True)
    ], num_dropped


ToolSchema = Mapping[str, object]
"""In the form that chat templates take: {type: function, function: {name, description, parameters}}."""


@cache
def read_tools(path: str) -> tuple[ToolSchema, ...]:
    """The schemas of a YAML or JSON file, in its order.

    Args:
        path: a list, or a mapping with one under ``tools``. An entry is a schema, or holds one under ``tool_schema`` beside what the tool
            itself needs.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"data.tools_path is {path!r}, which can't be read as YAML or JSON: {error}"
        ) from error
    entries = content.get("tools") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"data.tools_path is {path!r}, which holds no list of tools, alone or under `tools`: write one entry for each."
        )
    return tuple(
        _schema(entry, number=number, path=path) for number, entry in enumerate(entries, 1)
    )


def _schema(entry: object, *, number: int, path: str) -> ToolSchema:
    found = entry.get("tool_schema", entry) if isinstance(entry, dict) else entry
    function = found.get("function") if isinstance(found, dict) else None
    if (
        not isinstance(found, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise ConfigError(
            f"data.tools_path {path!r}: entry {number} is {found!r:.80}, but a schema is expected, "
            "{type: function, function: {name: ..., description: ..., parameters: ...}}."
        )
    return found
