"""Test that gathered values are decoded unchanged, and that other bytes are refused."""

import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import Denominators, from_sequences
from temper_engine_api.distributed.gather_codec import decode_value, encode_value
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MessageError,
    TemperError,
)
from temper_engine_api.metrics import LazyMetrics, Metric
from temper_engine_api.objective import HeadOutput


def message_of(text: object, content: bytes = b"") -> torch.Tensor:
    encoded = json.dumps(text).encode()
    data = len(encoded).to_bytes(8, "little") + encoded + content
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        1e-300,
        math.inf,
        "größer \udc80",
        [],
        (1, [2, ("three",)]),
        {"a": {1: None, (2, "b"): [False]}},
        {HeadOutput.LOGPROB: 0.5},
        Path("a/b"),
        Denominators(tokens=3, sequences=2, groups=1),
        {"loss": Metric(value=6.0, weight=3.0, reduction="sum")},
    ],
)
def test_values_arrive_with_their_types(value: object) -> None:
    arrived = decode_value(encode_value(value))
    assert arrived == value
    assert repr(arrived) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(math.nan),
        torch.zeros(0, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([True, False, True]),
        torch.randn(3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.randn(2, 2)),
    ],
)
def test_tensors_arrive_bit_for_bit(tensor: torch.Tensor) -> None:
    # A byte before it: its content begins at an address that its dtype could not be read from.
    _, arrived = decode_value(encode_value([torch.tensor([1], dtype=torch.uint8), tensor]))
    assert arrived.dtype == tensor.dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(
        arrived.reshape(-1).view(torch.uint8), tensor.detach().reshape(-1).view(torch.uint8)
    )


def test_a_batch_arrives_with_its_columns() -> None:
    batch = from_sequences(
        [torch.tensor([5, 6, 7]), torch.tensor([8, 9])],
        loss_masks=[torch.tensor([False, True, True]), torch.tensor([False, True])],
    ).with_columns({"weight": torch.arange(5.0)})
    arrived = decode_value(encode_value(batch))
    assert arrived.tokens.tolist() == [5, 6, 7, 8, 9]
    assert arrived.columns["weight"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_late_metrics_travel_as_a_plain_dict() -> None:
    late = LazyMetrics(lambda: {"loss": Metric(value=6.0, weight=2.0)})
    arrived = decode_value(encode_value(late))
    assert type(arrived) is dict
    assert arrived["loss"].result == 3.0


class TrainerError(CheckpointError):
    """An error of another package."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DamagedCheckpointError("a.pt"), DamagedCheckpointError),
        (TrainerError("b"), CheckpointError),
    ],
)
def test_errors_arrive_as_errors_of_the_contract(
    error: TemperError, kind: type[TemperError]
) -> None:
    arrived = decode_value(encode_value(error))
    assert type(arrived) is kind
    assert str(arrived) == str(error)


@dataclass(frozen=True)
class Unmarked:
    """A dataclass that is not gatherable."""

    number: int = 1


@pytest.mark.parametrize(
    "value", [Unmarked(), {1, 2}, b"bytes", object(), [len], torch.zeros(2).to_sparse()]
)
def test_other_values_are_refused_where_they_are_sent(value: object) -> None:
    with pytest.raises(MessageError, match="cannot be gathered from ranks: convert it"):
        encode_value(value)


def test_a_list_that_contains_itself_is_refused_where_it_is_sent() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(MessageError, match="cannot be gathered from ranks: it is nested too"):
        encode_value(value)


@pytest.mark.parametrize(
    "message",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.frombuffer(bytearray(pickle.dumps([1])), dtype=torch.uint8),
        encode_value([1, 2])[:-1],
        message_of({"call": ["os.system", "true"]}),
        message_of({"object": ["subprocess.Popen", {"args": "true"}]}),
        message_of({"object": ["temper_engine_api.batch.Denominators", {"tokens": 1}]}),
        message_of({"enum": ["temper_engine_api.objective.HeadOutput", "no such head"]}),
        message_of({"error": ["annotations", "text"]}),
        message_of({"tuple": [1], "path": "a"}),
        message_of({"dict": [[[1], 2]]}),
        message_of({"tensor": ["torch.float32", [2]]}, bytes(7)),
        message_of({"tensor": ["torch.float32", [-1]]}, bytes(4)),
        message_of({"tensor": ["torch.float32", [0, 2**80]]}),
        message_of({"tensor": ["torch.float32", [2**40]]}, bytes(4)),
        torch.frombuffer(bytearray((2**63).to_bytes(8, "little") + b"[]"), dtype=torch.uint8),
        message_of({"tensor": ["torch.qint8", [1]]}, bytes(1)),
        message_of([], b"left over"),
    ],
)
def test_bytes_that_are_no_value_are_refused(message: torch.Tensor) -> None:
    with pytest.raises(
        MessageError, match=r"are not a value of Temper \(.*; nothing of it was executed"
    ):
        decode_value(message)


def test_deeply_nested_lists_are_refused() -> None:
    text = b"[" * 200_000
    data = len(text).to_bytes(8, "little") + text
    with pytest.raises(MessageError, match="are not a value of Temper"):
        decode_value(torch.frombuffer(bytearray(data), dtype=torch.uint8))
