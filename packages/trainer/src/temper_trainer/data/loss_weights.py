"""Loss weights of demonstrations: read them from rows, and give one to each token."""

import math
from collections.abc import Iterable, Mapping, Sequence

from temper_trainer.config.data import DataSource, RecordSource
from temper_trainer.data.rows import ABSENT, DataError, Row, get_field


def read_loss_weights(
    record: object, *, config: RecordSource, location: str
) -> float | tuple[float, ...] | None:
    """Return the weights that `loss_weight_key` names in a raw record; see `Row.loss_weights`.

    In a conversation the key names a field in each message. There a message without it has weight
    1, as in other systems, and None is returned if no message has it.

    Raises:
        DataError: If the field is missing, a weight is negative or no finite number, or a message
            that is not the assistant's has a weight above 0.

    Example:
        >>> from temper_trainer.config.data import JsonlSource
        >>> config = JsonlSource(paths=("rows.jsonl",), loss_weight_key="weight")
        >>> read_loss_weights({"weight": [0, 0.5, 1]}, config=config, location="rows.jsonl:1")
        (0.0, 0.5, 1.0)
    """
    key = config.loss_weight_key
    assert key is not None
    assert isinstance(record, Mapping)
    where = f"{location}: field {key!r}, which loss_weight_key names,"
    if config.messages_key is not None:
        messages = get_field(record, config.messages_key)
        assert isinstance(messages, list | tuple)
        return _read_message_weights(messages, key=key, where=where)
    value = get_field(record, key)
    if value is ABSENT:
        raise DataError(
            f"{location}: there is no field {key!r} among {sorted(map(str, record))}: correct the "
            "row, or set loss_weight_key."
        )
    if isinstance(value, list | tuple):
        return tuple(
            _parse_weight(each, where=f"{where} token {i}") for i, each in enumerate(value)
        )
    return _parse_weight(value, where=where)


def _read_message_weights(
    messages: Sequence[object], *, key: str, where: str
) -> tuple[float, ...] | None:
    weights: list[float] = []
    is_given = False
    for i, message in enumerate(messages):
        assert isinstance(message, Mapping)
        value, is_trained = message.get(key), message.get("role") == "assistant"
        # Columnar files have null where a message lacks the field.
        if value is None:
            weights.append(float(is_trained))
            continue
        is_given = True
        weight = _parse_weight(value, where=f"{where} message {i}")
        if weight and not is_trained:
            raise DataError(
                f"{where} message {i} is {value!r} for role {message.get('role')}, but only the "
                "assistant's messages are trained: set it to 0, or leave it out."
            )
        weights.append(weight)
    return tuple(weights) if is_given else None


def _parse_weight(value: object, *, where: str) -> float:
    # Booleans, because data sets also mark the messages to train with true and false.
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise DataError(
            f"{where} must be a finite number of at least 0, but is {value!r:.80}: correct the row."
        )
    return float(value)


def give_token_weights(row: Row, *, num_tokens: int) -> tuple[float, ...] | None:
    """Return one weight per token of a row's solution and its end token; None without weights.

    Raises:
        DataError: If the row has another number of weights, or only zeros.
    """
    weights = row.loss_weights
    if weights is None:
        return None
    given = (weights,) * num_tokens if isinstance(weights, float) else weights
    if len(given) != num_tokens:
        raise DataError(
            f"{row.location}: there are {len(given)} loss weights, but the solution has "
            f"{num_tokens} tokens with its end token: use the run's tokenizer to make them, with a "
            "weight for the end token, or give one number for the full row."
        )
    check_any_weight(given, location=row.location)
    return given


def check_any_weight(weights: Sequence[float], *, location: str) -> None:
    """Raise if the weights for all trained tokens in a demonstration are 0.

    Raises:
        DataError: Naming the row.
    """
    if not any(weights):
        raise DataError(
            f"{location}: all loss weights are 0, so there is nothing to train: remove the row, or "
            "correct the weights."
        )


def describe_missing_weights(rows: Iterable[Row], *, config: DataSource) -> str | None:
    """Return why conversations without any weight are refused, or None if one has weights."""
    if config.loss_weight_key is None or any(row.loss_weights is not None for row in rows):
        return None
    return (
        f"no message of {config.location} has the field {config.loss_weight_key!r}, which "
        "loss_weight_key names: correct the key, or remove it to weight all tokens equally."
    )
