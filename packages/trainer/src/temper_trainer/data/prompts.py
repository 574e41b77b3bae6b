"""Convert rows to token ids: prompts to complete, demonstrations and preference pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DataConfig, describe_overlong_remedies
from temper_trainer.data.conversations import encode_conversation, render_messages
from temper_trainer.data.loss_weights import give_token_weights
from temper_trainer.data.rows import ChatMessage, DataError, PairRow, PreferenceRow, Row
from temper_trainer.types import Demonstration, LabeledCompletion, Pair, Prompt

_PLACEHOLDER = "{prompt}"


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    must_keep: bool = True,
    must_use_tools: bool = True,
) -> tuple[list[Prompt], int]:
    """Tokenize rows in order, and return the prompts and how many overlong rows were dropped.

    With ``must_keep=False`` it is no error if no row is left, and with ``must_use_tools=False`` if
    no prompt mentions the tools.

    Raises:
        DataError: If a prompt is overlong (with ``overlong_prompts=error``) or has no tokens, if no
            row is left, or if the chat template cannot render a row.
        ConfigError: If chat messages or tools are given without a chat template that supports them.
    """
    kept = _encode(rows, tokenizer, config, must_keep=must_keep, must_use_tools=must_use_tools)
    return [prompt for _, prompt in kept], len(rows) - len(kept)


def encode_demonstrations(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    must_keep: bool = True,
    must_use_tools: bool = True,
) -> tuple[list[Demonstration], int]:
    """Tokenize prompts with their solutions.

    The end token is appended to each solution. A conversation is a demonstration by itself; see
    ``encode_conversation``. With ``must_keep=False`` the result may be empty. With
    ``must_use_tools=False`` it is no error if no prompt mentions the tools.

    Returns:
        The demonstrations, and the number of rows that were dropped.

    Raises:
        DataError: As in encode_prompts.
        ConfigError: As in encode_prompts.
    """
    if (
        config.train is not None
        and config.train.messages_key is not None
        and rows
        and all(isinstance(row.prompt, tuple) and not row.solution for row in rows)
    ):
        encoded = [encode_conversation(row, tokenizer, config) for row in rows]
        fitting = [item for item in encoded if _fits(item.prompt, config=config)]
        # A limit that drops every row is a wrong limit, and would only show as an empty data set.
        if must_keep and not fitting:
            raise _all_overlong_error(len(rows), config=config)
        return fitting, len(rows) - len(fitting)
    kept = _encode(rows, tokenizer, config, must_keep=must_keep, must_use_tools=must_use_tools)
    # Tokenized without the prompt: the policy also continues after the prompt's last token, and a
    # token that spans both could never be sampled.
    solutions = (
        tokenizer([row.solution for row, _ in kept], add_special_tokens=False)["input_ids"]
        if kept
        else []
    )
    end = tokenizer.eos_token_id
    demonstrations = [
        Demonstration(
            prompt=prompt,
            tokens=(*ids, end),
            loss_weights=give_token_weights(row, num_tokens=len(ids) + 1),
        )
        for (row, prompt), ids in zip(kept, solutions, strict=True)
    ]
    return demonstrations, len(rows) - len(kept)


def render_prompt(row: Row, *, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    """Return the text to tokenize: a string in its template, or messages in the chat template.

    The chat template opens the assistant's turn.

    Raises:
        ConfigError: As in encode_prompts.
        DataError: If the chat template cannot render the row.
    """
    if isinstance(row.prompt, str):
        # str.format would fail, because templates and prompts contain other braces.
        return config.prompt_template.replace(_PLACEHOLDER, row.prompt)
    template = config.chat_template or tokenizer.chat_template
    if template is None:
        raise ConfigError(
            f"{row.location} is a list of chat messages, but the tokenizer has no chat template: "
            "set data.chat_template."
        )
    return render_messages(
        row.prompt,
        tokenizer,
        template=template,
        opens_turn=True,
        location=row.location,
        tools=None if config.tools_path is None else read_tools(config.tools_path),
    )


def _check_tools(
    rows: Sequence[Row],
    texts: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
) -> None:
    """Raise if no prompt mentions the tools."""
    if config.tools_path is None:
        return
    without = replace(config, tools_path=None)
    described = next((i for i, row in enumerate(rows) if not isinstance(row.prompt, str)), None)
    if described is None:
        raise ConfigError(
            "data.tools_path has no effect: no prompt is a list of chat messages. Remove it, or "
            "set string_prompts."
        )
    # One prompt is enough, because all use the same template and tools.
    if texts[described] == render_prompt(rows[described], tokenizer=tokenizer, config=without):
        raise ConfigError(
            f"data.tools_path is {config.tools_path!r}, but the chat template does not use tools: "
            "set a data.chat_template that does."
        )


def _fits(prompt: Prompt, *, config: DataConfig) -> bool:
    """Return True if a prompt is short enough; raise if overlong prompts are an error."""
    length = max(len(prompt.tokens), len(prompt.teacher_tokens))
    if length <= config.max_prompt_tokens:
        return True
    if config.overlong_prompts == "drop":
        return False
    kind = "prompt" if length == len(prompt.tokens) else "teacher's prompt"
    raise DataError(
        f"{prompt.location}: the {kind} has {length} tokens, but "
        f"data.max_prompt_tokens is {config.max_prompt_tokens}: "
        f"{describe_overlong_remedies(config)}."
    )


def _all_overlong_error(num_rows: int, *, config: DataConfig) -> DataError:
    return DataError(
        f"all {num_rows} prompts are longer than data.max_prompt_tokens, which is "
        f"{config.max_prompt_tokens}: raise it."
    )


def _encode(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    must_keep: bool = True,
    must_use_tools: bool = True,
) -> list[tuple[Row, Prompt]]:
    """Return each row that fits, with its prompt."""
    if not rows:
        return []
    questions = [row.question for row in rows]  # before a template is applied
    if config.string_prompts == "user_message":
        rows = [_to_user_message(row, config) for row in rows]
    texts = [render_prompt(row, tokenizer=tokenizer, config=config) for row in rows]
    if must_use_tools:
        _check_tools(rows, texts, tokenizer=tokenizer, config=config)
    encoded = []
    for row, question, text, ids, teacher_ids, completion in zip(
        rows,
        questions,
        texts,
        _tokenize(rows, texts, tokenizer),
        _tokenize_teacher_prompts(rows, tokenizer, config),
        _tokenize_completions(rows, tokenizer),
        strict=True,
    ):
        prompt = Prompt(
            prompt_id=row.row_id,
            text=text,
            tokens=ids,
            answer=row.answer,
            difficulty=row.difficulty,
            question=question,
            location=row.location,
            extra=row.extra,
            teacher_tokens=teacher_ids,
            given_completion=completion,
            route=row.route,
            category=row.category,
            reward=row.reward,
            environment=row.environment,
            source=row.source,
        )
        if _fits(prompt, config=config):
            encoded.append((row, prompt))
    if must_keep and not encoded:
        raise _all_overlong_error(len(rows), config=config)
    return encoded


def _tokenize(
    rows: Sequence[Row], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """Return the token ids of the rows' prompts, given their texts."""
    if not rows:
        return []
    # A chat template writes the special tokens itself. For plain text the tokenizer adds its own,
    # such as a BOS token.
    plain = tokenizer(list(texts))["input_ids"]
    bare = (
        tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        if any(not isinstance(row.prompt, str) for row in rows)
        else plain
    )
    tokenized = []
    for row, text, with_special, without in zip(rows, texts, plain, bare, strict=True):
        ids = _strip_end_token(with_special, tokenizer) if isinstance(row.prompt, str) else without
        if all(token == tokenizer.unk_token_id for token in ids):
            raise DataError(
                f"{row.location}: the prompt {text!r:.80} has no known tokens, so there is nothing "
                "to complete: the text is empty, or the tokenizer knows none of its words. Correct "
                "the row, or use the tokenizer of the model."
            )
        tokenized.append(tuple(ids))
    return tokenized


def _tokenize_teacher_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[tuple[int, ...]]:
    """Return the token ids of each row's prompt for the teacher; empty for rows without one."""
    indices = [i for i, row in enumerate(rows) if row.teacher_prompt is not None]
    teacher_rows = [replace(rows[i], prompt=rows[i].teacher_prompt or "") for i in indices]
    if config.string_prompts == "user_message":
        teacher_rows = [_to_user_message(row, config) for row in teacher_rows]
    texts = [render_prompt(row, tokenizer=tokenizer, config=config) for row in teacher_rows]
    tokenized: list[tuple[int, ...]] = [()] * len(rows)
    for i, ids in zip(indices, _tokenize(teacher_rows, texts, tokenizer), strict=True):
        tokenized[i] = ids
    return tokenized


def _tokenize_completions(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """Return the token ids of each row's completion with the end token; empty without one."""
    # Tokenized without the prompt, as in demonstrations.
    return [
        ()
        if row.completion is None
        else (
            *tokenizer(row.completion, add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        )
        for row in rows
    ]


def _to_user_message(row: Row, config: DataConfig) -> Row:
    """Convert a string prompt, in its template, to one user message."""
    if not isinstance(row.prompt, str):
        return row
    content = config.prompt_template.replace(_PLACEHOLDER, row.prompt)
    return replace(row, prompt=(ChatMessage(role="user", content=content),))


def _strip_end_token(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """Remove a trailing end token, after which there would be nothing to complete.

    Some tokenizers, such as T5's, append it to every text.
    """
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def encode_preferences(
    rows: Sequence[PreferenceRow],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    must_keep: bool = True,
) -> tuple[list[Pair | LabeledCompletion], int]:
    """Tokenize pairs or labeled completions, and return them and how many rows were dropped.

    With ``must_keep=False`` it is no error if no row is left.

    Raises:
        DataError: As in encode_demonstrations.
    """
    demonstrations, _ = encode_demonstrations(
        [each for row in rows for each in row.rows], tokenizer, config, must_keep=must_keep
    )
    by_row: dict[int, list[Demonstration]] = {}
    # Rows are dropped for their prompt, which both of a pair have in common.
    for demonstration in demonstrations:
        by_row.setdefault(demonstration.prompt.prompt_id, []).append(demonstration)
    kept = [row for row in rows if row.rows[0].row_id in by_row]
    return [_join(row, by_row[row.rows[0].row_id]) for row in kept], len(rows) - len(kept)


def _join(row: PreferenceRow, demonstrations: Sequence[Demonstration]) -> Pair | LabeledCompletion:
    if isinstance(row, PairRow):
        chosen, rejected = demonstrations
        return Pair(chosen=chosen, rejected=rejected, margin=row.margin)
    (completion,) = demonstrations
    return LabeledCompletion(completion=completion, is_desirable=row.is_desirable)


ToolSchema = Mapping[str, object]
"""{type: function, function: {name, description, parameters}}, as chat templates expect it."""


# Cached, because every prompt is rendered with the tools.
@cache
def read_tools(path: str) -> tuple[ToolSchema, ...]:
    """Return the tool schemas of a YAML or JSON file, in order.

    Args:
        path: File with a list, or a mapping with one under ``tools``. An entry is a schema, or has
            one under ``tool_schema`` next to the tool's own settings.

    Raises:
        ConfigError: If the file does not exist or has another content.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"data.tools_path is {path!r}, which cannot be read as YAML or JSON: {error}"
        ) from error
    entries = content.get("tools") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"data.tools_path is {path!r}, which has no list of tools at the top level or under "
            "`tools`: add one entry per tool."
        )
    return tuple(
        _schema(entry, number=number, path=path) for number, entry in enumerate(entries, 1)
    )


def _schema(entry: object, *, number: int, path: str) -> ToolSchema:
    schema = entry.get("tool_schema", entry) if isinstance(entry, dict) else entry
    function = schema.get("function") if isinstance(schema, dict) else None
    if (
        not isinstance(schema, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise ConfigError(
            f"data.tools_path {path!r}: entry {number} is {schema!r:.80}, but a schema is "
            "expected, {type: function, function: {name: ..., description: ..., parameters: ...}}."
        )
    return schema
