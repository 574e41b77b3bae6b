"""A problem as its source gives it, before tokenisation, and the check that makes one from a raw record."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from temper_engine_api.errors import TemperError
from temper_trainer.config.data import SourceConfig


class DataError(TemperError, ValueError):
    """A data file, row or prompt is not what the configuration promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """system, user or assistant."""
    content: str
    """What was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem."""

    row_id: int
    """Counted from 0 over all files of the source, in their order."""
    prompt: str | tuple[ChatMessage, ...]
    """The question; chat messages go through a chat template."""
    answer: str
    """Reference answer, for scoring."""
    solution: str
    """What a demonstration shows: the answer, except in a source that makes deliberately wrong demonstrations."""
    source: str
    """Where it stands, for messages: file and line, or the name of the source."""
    route: str = ""
    """Value of the source's route_key."""
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)
    """What stands in the fields that the source's extra_keys name; None where a row has no such field."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that is ever tokenised; what a tokenizer learns from."""
        asked = (
            (self.prompt,)
            if isinstance(self.prompt, str)
            else tuple(message.content for message in self.prompt)
        )
        return (*asked, self.answer, self.solution)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """One preference before tokenisation."""

    chosen: Row
    """Prompt with the preferred completion as its solution."""
    rejected: Row
    """The same prompt with the other one."""


def row_from_record(record: object, *, config: SourceConfig, row_id: int, source: str) -> Row:
    """The row in one raw record.

    Args:
        record: what the file held, expected to be a mapping from field to value.
        config: names the fields.
        row_id: of the new row.
        source: file and line or row, for messages.

    Raises:
        DataError: the record is no mapping, lacks a field, or a field has the wrong type or is empty.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"{source}: expected an object with fields {config.prompt_key!r} and {config.answer_key!r}, but found {record!r:.80}."
        )
    if config.messages_key is not None:
        return _conversation_row(record, key=config.messages_key, row_id=row_id, source=source)
    _check_field(record, config.prompt_key, setting="prompt_key", source=source)
    _check_field(record, config.answer_key, setting="answer_key", source=source)
    answer = get_field(record, config.answer_key)
    if not isinstance(answer, str):
        raise DataError(
            f"{source}: field {config.answer_key!r} must be text, but is {type(answer).__name__} {answer!r:.80}."
        )
    prompt = _prompt(
        get_field(record, config.prompt_key), where=f"{source}: field {config.prompt_key!r}"
    )
    extra = {
        key: None if (value := get_field(record, key)) is ABSENT else value
        for key in config.extra_keys
    }
    route = "" if config.route_key is None else _route(record, key=config.route_key, source=source)
    return Row(
        row_id=row_id,
        prompt=prompt,
        answer=answer,
        solution=answer,
        source=source,
        route=route,
        extra=extra,
    )


def pair_from_record(record: object, *, config: SourceConfig, row_id: int, source: str) -> PairRow:
    """Return the pair in one raw record; arguments and errors as of `row_from_record`."""
    found = {}
    for key, setting in ((config.chosen_key, "chosen_key"), (config.rejected_key, "rejected_key")):
        if isinstance(record, Mapping):
            _check_field(record, key, setting=setting, source=source)
        row = row_from_record(
            record, config=replace(config, answer_key=key), row_id=row_id, source=source
        )
        if not row.answer.strip():
            raise DataError(
                f"{source}: field {key!r} is empty: a pair needs two completions. Remove the row."
            )
        found[key] = row
    if found[config.chosen_key].answer == found[config.rejected_key].answer:
        raise DataError(
            f"{source}: fields {config.chosen_key!r} and {config.rejected_key!r} are equal, which says nothing: remove the row."
        )
    return PairRow(chosen=found[config.chosen_key], rejected=found[config.rejected_key])


def _check_field(record: Mapping[object, object], key: str, *, setting: str, source: str) -> None:
    if get_field(record, key) is ABSENT:
        fields = sorted(map(str, record))
        raise DataError(
            f"{source}: there is no field {key!r} among {fields}: correct the row, or set {setting}."
        )


class _Absent:
    """What a field that is not there holds."""


ABSENT = _Absent()


def get_field(record: Mapping[object, object], key: str) -> object:
    """The value of a field, by its own name or, where none has that name, by the path OUTER.INNER; ABSENT where there is none."""
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    below = record.get(outer) if dot else None
    return get_field(below, inner) if isinstance(below, Mapping) else ABSENT


def _conversation_row(
    record: Mapping[object, object], *, key: str, row_id: int, source: str
) -> Row:
    """A whole conversation as the prompt; what of it is trained is decided where it is tokenised."""
    value = get_field(record, key)
    if value is ABSENT:
        raise DataError(
            f"{source}: there is no field {key!r} among {sorted(map(str, record))}: correct the row, or set messages_key."
        )
    messages = _prompt(value, where=f"{source}: field {key!r}")
    if isinstance(messages, str) or not any(message.role == "assistant" for message in messages):
        raise DataError(
            f"{source}: field {key!r} must be a list of chat messages with one of role assistant: there is nothing to imitate."
        )
    return Row(row_id=row_id, prompt=messages, answer="", solution="", source=source)


def _route(record: Mapping[object, object], *, key: str, source: str) -> str:
    value = get_field(record, key)
    if not isinstance(value, str):
        raise DataError(
            f"{source}: field {key!r}, which route_key names, must be text, but is {value!r:.80}: mend the row."
        )
    return value


def _prompt(value: object, *, where: str) -> str | tuple[ChatMessage, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(
                f"{where} is empty: there is nothing to complete. Remove the row or fill it in."
            )
        return value
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{where} must be text or a list of chat messages, but is {type(value).__name__} {value!r:.80}."
        )
    if not value:
        raise DataError(
            f"{where} is a list of no messages: there is nothing to complete. Remove the row or fill it in."
        )
    return tuple(_message(item, where=f"{where}, message {i}") for i, item in enumerate(value))


def _message(item: object, *, where: str) -> ChatMessage:
    if isinstance(item, Mapping):
        role, content = item.get("role"), item.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return ChatMessage(role=role, content=content)
    raise DataError(f"{where} must have role and content, both text, but is {item!r:.80}.")
