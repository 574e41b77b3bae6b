"""One row of a data source before tokenization, and its validation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from temper_engine_api.errors import TemperError
from temper_trainer.config.data import RecordSource
from temper_trainer.settings.names import is_import_path


class DataError(TemperError, ValueError):
    """A data file, row or prompt does not match the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message in a conversation."""

    role: str
    """system, user or assistant."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt with its reference answer.

    Example:
        >>> row = Row(
        ...     row_id=0,
        ...     prompt=(ChatMessage(role="user", content="What is 6 * 7?"),),
        ...     answer="42",
        ...     solution="6 * 7 = 42",
        ...     location="train.jsonl:1",
        ... )
        >>> row.prompt[0].content
        'What is 6 * 7?'
    """

    row_id: int
    """Index over all files of the source, in order, from 0."""
    prompt: str | tuple[ChatMessage, ...]
    """The question; chat messages go through a chat template."""
    answer: str
    """Reference answer, for scoring."""
    solution: str
    """Text that supervised training imitates.

    Equal to the answer, unless wrong demonstrations were generated on purpose."""
    location: str
    """File and line, or the data source's name, for messages."""
    teacher_prompt: str | tuple[ChatMessage, ...] | None = None
    """Prompt of the policy as its own teacher; None if it is the same."""
    completion: str | None = None
    """Given completion of the prompt; None if there is none."""
    difficulty: float | None = None
    """Value of the field that the source's `difficulty_key` names."""
    loss_weights: float | tuple[float, ...] | None = None
    """Weights in the loss: a number for all solution tokens, one number for each solution token and
    the end token, or one per message of a conversation. None if the row has no weights."""
    route: str = ""
    """Value of the field that the source's `route_key` names; selects a reward or teacher."""
    category: str = ""
    """Value of the field that the source's `category_key` names; evaluations report each one."""
    reward: str = ""
    """Name of the reward; empty for the main one."""
    environment: str = ""
    """Name of the environment; empty for the main one."""
    source: str = ""
    """Key of its training source, such as `data.train`; set if there are several."""
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Values of the source's extra_keys; None if the row lacks the field."""

    @property
    def question(self) -> str:
        """The prompt as text, for judges: several messages start with their roles."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return self.prompt[0].content
        return "\n\n".join(f"{message.role}: {message.content}" for message in self.prompt)

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the row that are tokenized; a trained tokenizer learns from them."""
        prompts = [
            text
            for prompt in (self.prompt, self.teacher_prompt)
            if prompt is not None
            for text in (
                (prompt,) if isinstance(prompt, str) else (message.content for message in prompt)
            )
        ]
        return (*prompts, self.answer, self.solution, *filter(None, [self.completion]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """One preference pair before tokenization."""

    chosen: Row
    """Prompt with the preferred completion as its solution."""
    rejected: Row
    """The same prompt with the other completion."""
    margin: float = 0.0
    """Value of the field that the source's `margin_key` names."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of both completions, the preferred one first."""
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledRow:
    """One completion with a label before tokenization."""

    row: Row
    """Prompt with the completion as its solution."""
    is_desirable: bool

    @property
    def rows(self) -> tuple[Row, ...]:
        """The row of the completion."""
        return (self.row,)


PreferenceRow = PairRow | LabeledRow


def build_row(record: object, *, config: RecordSource, row_id: int, location: str) -> Row:
    """Validate one raw record and return its row.

    Args:
        record: Must be a mapping from field to value.
        config: Names the fields.
        row_id: Index of the new row.
        location: File and line, for messages.

    Raises:
        DataError: If the record is not a mapping, or a field is missing, empty or of the wrong
            type.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"{location}: expected an object with fields {config.prompt_key!r} and "
            f"{config.answer_key!r}, but found {record!r:.80}: write each row as an object, as in "
            f'{{"{config.prompt_key}": "...", "{config.answer_key}": "..."}}.'
        )
    if config.messages_key is not None:
        return _build_conversation_row(
            record, key=config.messages_key, row_id=row_id, location=location
        )
    _check_field(record, config.prompt_key, setting="prompt_key", location=location)
    _check_field(record, config.answer_key, setting="answer_key", location=location)
    answer = get_field(record, config.answer_key)
    if isinstance(answer, int) and not isinstance(answer, bool):
        # Common in data sets of mathematics. Not float: 0.1 has more than one spelling.
        answer = str(answer)
    if not isinstance(answer, str):
        raise DataError(
            f"{location}: field {config.answer_key!r} must be text or an integer, but is "
            f"{type(answer).__name__} {answer!r:.80}: correct or remove the row, or set answer_key."
        )
    prompt = _parse_prompt(
        get_field(record, config.prompt_key), location=f"{location}: field {config.prompt_key!r}"
    )
    teacher_prompt = None
    if config.teacher_prompt_key is not None:
        key = config.teacher_prompt_key
        _check_field(record, key, setting="teacher_prompt_key", location=location)
        teacher_prompt = _parse_prompt(
            get_field(record, key), location=f"{location}: field {key!r}"
        )
    extra = {
        key: None if (value := get_field(record, key)) is ABSENT else value
        for key in config.extra_keys
    }
    route = (
        ""
        if config.route_key is None
        else _parse_route(record, key=config.route_key, location=location)
    )
    return Row(
        row_id=row_id,
        prompt=prompt,
        answer=answer,
        solution=answer,
        location=location,
        teacher_prompt=teacher_prompt,
        completion=None
        if config.completion_key is None
        else _parse_completion(record, key=config.completion_key, location=location),
        route=route,
        category=""
        if config.category_key is None
        else _parse_category(record, key=config.category_key, location=location),
        reward=config.reward or ""
        if config.reward_key is None
        else _parse_reward(record, key=config.reward_key, location=location),
        environment=config.environment or "",
        extra=extra,
    )


def build_pair(record: object, *, config: RecordSource, row_id: int, location: str) -> PairRow:
    """Validate one raw record and return its preference pair; see `build_row`."""
    rows = {}
    for key, setting in ((config.chosen_key, "chosen_key"), (config.rejected_key, "rejected_key")):
        if isinstance(record, Mapping):
            _check_field(record, key, setting=setting, location=location)
        row = build_row(
            record, config=replace(config, answer_key=key), row_id=row_id, location=location
        )
        if not row.answer.strip():
            raise DataError(
                f"{location}: field {key!r} is empty: a pair needs two completions. Remove the row."
            )
        rows[key] = row
    if rows[config.chosen_key].answer == rows[config.rejected_key].answer:
        raise DataError(
            f"{location}: fields {config.chosen_key!r} and {config.rejected_key!r} are equal, so "
            "there is no preference: remove the row."
        )
    margin = (
        0.0
        if config.margin_key is None
        else parse_number(record, key=config.margin_key, setting="margin_key", location=location)
    )
    return PairRow(
        chosen=rows[config.chosen_key], rejected=rows[config.rejected_key], margin=margin
    )


def build_labeled_row(
    record: object, *, config: RecordSource, row_id: int, location: str
) -> LabeledRow:
    """Validate one raw record and return its labeled completion; see `build_row`."""
    row = build_row(record, config=config, row_id=row_id, location=location)
    if not row.answer.strip():
        raise DataError(
            f"{location}: field {config.answer_key!r} is empty: there is no completion. Remove the "
            "row."
        )
    assert isinstance(record, Mapping)
    _check_field(record, config.label_key, setting="label_key", location=location)
    label = get_field(record, config.label_key)
    # 1 and 0 are common in files that were written by other languages.
    if not isinstance(label, bool) and (not isinstance(label, int) or label not in (0, 1)):
        raise DataError(
            f"{location}: field {config.label_key!r}, which label_key names, must be true for a "
            f"desirable completion or false for another one, but is {label!r:.80}: correct the row."
        )
    return LabeledRow(row=row, is_desirable=bool(label))


def describe_missing_label(rows: Sequence[PreferenceRow], *, config: RecordSource) -> str | None:
    """Return why all labels of a source are refused, or None if both occur or there are none."""
    labels = {row.is_desirable for row in rows if isinstance(row, LabeledRow)}
    if len(labels) != 1:
        return None
    return (
        f"all {len(rows)} rows of {config.location} have the label {labels.pop()} in field "
        f"{config.label_key!r}, but KTO learns from the difference between desirable and "
        "undesirable completions: add rows with the other label, or use task=sft."
    )


def _check_field(record: Mapping[object, object], key: str, *, setting: str, location: str) -> None:
    if get_field(record, key) is ABSENT:
        fields = sorted(map(str, record))
        raise DataError(
            f"{location}: there is no field {key!r} among {fields}: correct the row, or set "
            f"{setting}."
        )


def _parse_completion(record: Mapping[object, object], *, key: str, location: str) -> str:
    _check_field(record, key, setting="completion_key", location=location)
    completion = get_field(record, key)
    if not isinstance(completion, str) or not completion:
        raise DataError(
            f"{location}: field {key!r} must be text that is not empty, but is "
            f"{type(completion).__name__} {completion!r:.80}: correct or remove the row, or set "
            "completion_key."
        )
    return completion


class _Absent:
    """Type of ABSENT, which stands for a missing field."""


ABSENT = _Absent()


def get_field(record: Mapping[object, object], key: str) -> object:
    """Return a field by its name, else by the path OUTER.INNER, else ABSENT."""
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    nested = record.get(outer) if dot else None
    return get_field(nested, inner) if isinstance(nested, Mapping) else ABSENT


def _build_conversation_row(
    record: Mapping[object, object], *, key: str, row_id: int, location: str
) -> Row:
    """Return a row whose prompt is the full conversation."""
    value = get_field(record, key)
    if value is ABSENT:
        raise DataError(
            f"{location}: there is no field {key!r} among {sorted(map(str, record))}: correct the "
            "row, or set messages_key."
        )
    messages = _parse_prompt(value, location=f"{location}: field {key!r}")
    if isinstance(messages, str) or not any(message.role == "assistant" for message in messages):
        raise DataError(
            f"{location}: field {key!r} must be a list of chat messages with one of role "
            "assistant: there is nothing to imitate."
        )
    return Row(row_id=row_id, prompt=messages, answer="", solution="", location=location)


def parse_number(record: object, *, key: str, setting: str, location: str) -> float:
    """Return a finite number from a record.

    Args:
        record: A mapping of field names to values.
        key: Name of the field.
        setting: Configuration key that names the field, for the message.
        location: File and line of the record, for the message.

    Raises:
        DataError: If the field is missing, or its value is not a finite number.
    """
    assert isinstance(record, Mapping)
    _check_field(record, key, setting=setting, location=location)
    value = get_field(record, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"{location}: field {key!r}, which {setting} names, must be a finite number, but is "
            f"{value!r:.80}: correct the row."
        )
    return float(value)


def _parse_route(record: Mapping[object, object], *, key: str, location: str) -> str:
    value = get_field(record, key)
    if not isinstance(value, str):
        raise DataError(
            f"{location}: field {key!r}, which route_key names, must be text, but is "
            f"{value!r:.80}: correct the row."
        )
    return value


def _parse_reward(record: Mapping[object, object], *, key: str, location: str) -> str:
    value = get_field(record, key)
    if value is not None and not isinstance(value, str):
        description = "absent" if value is ABSENT else f"{value!r:.80}"
        raise DataError(
            f"{location}: field {key!r}, which reward_key names, must be text or null, but is "
            f"{description}: correct the row."
        )
    if is_import_path(value or ""):
        # Data must not decide which code is run.
        raise DataError(
            f"{location}: field {key!r}, which reward_key names, is the import path {value!r}, but "
            "must be a name: define it in reward.functions."
        )
    return value or ""


def _parse_category(record: Mapping[object, object], *, key: str, location: str) -> str:
    value = get_field(record, key)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer and not (isinstance(value, str) and value.strip()):
        description = "absent" if value is ABSENT else f"{value!r:.80}"
        raise DataError(
            f"{location}: field {key!r}, which category_key names, must be text or an integer, but "
            f"is {description}: correct the row."
        )
    return str(value).strip()


def _parse_prompt(value: object, *, location: str) -> str | tuple[ChatMessage, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(
                f"{location} is empty: there is nothing to complete. Remove the row or fill it in."
            )
        return value
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{location} must be text or a list of chat messages, but is {type(value).__name__} "
            f"{value!r:.80}: write it as text, or name the field that has the prompts."
        )
    if not value:
        raise DataError(
            f"{location} is an empty list: there is nothing to complete. Remove the row or add "
            "messages."
        )
    return tuple(
        _parse_message(item, location=f"{location}, message {i}") for i, item in enumerate(value)
    )


def _parse_message(item: object, *, location: str) -> ChatMessage:
    if isinstance(item, Mapping):
        role, content = item.get("role"), item.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return ChatMessage(role=role, content=content)
    raise DataError(f"{location} must have role and content, both text, but is {item!r:.80}.")
