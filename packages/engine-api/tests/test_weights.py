"""Test that an incomplete set of weights is refused, and the checksum of tensors."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NoReturn

import pytest
import torch
from blake3 import blake3

from temper_engine_api.errors import EngineStateError, WeightError
from temper_engine_api.weights import (
    StateStream,
    TrainingState,
    WeightEntry,
    check_weight_entries,
    hash_tensors,
    list_file_shapes,
    split_experts,
)


def entries(**shapes: tuple[int, ...]) -> list[WeightEntry]:
    return [
        WeightEntry(name=name, shape=shape, dtype=torch.float32) for name, shape in shapes.items()
    ]


def test_the_same_set_in_another_order_is_complete() -> None:
    check_weight_entries(entries(a=(2,), b=(3,)), entries(b=(3,), a=(2,)))


def test_every_fault_is_named() -> None:
    with pytest.raises(
        WeightError,
        match=r"b: shape \(3,\), expected \(4,\); missing a; unexpected c. Nothing was loaded",
    ):
        check_weight_entries(entries(a=(2,), b=(4,)), entries(b=(3,), c=(1,)))


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(WeightError, match=r"1 names came twice"):
        check_weight_entries(entries(a=(2,)), entries(a=(2,)) * 2)


def test_many_faults_are_counted() -> None:
    with pytest.raises(WeightError, match=r"missing w0; .*missing w4 and 2 more"):
        check_weight_entries(entries(**{f"w{i}": (1,) for i in range(7)}), [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_the_checksum_is_that_of_the_bytes(dtype: torch.dtype) -> None:
    one, two = torch.arange(6).view(2, 3).to(dtype), torch.tensor(1).to(dtype)
    raw = b"".join(
        bytes(t.contiguous().view(torch.uint8).flatten().tolist()) for t in (one, two.view(1))
    )
    expected = f"blake3:{blake3(raw).hexdigest()}"
    assert hash_tensors([one, two]) == expected
    assert hash_tensors([one.t().contiguous().t(), two]) == expected


def test_joined_experts_are_split_into_views_under_their_names_in_files() -> None:
    # Two experts; the gate is above the up-projection, one row each.
    joined = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    parts = dict(split_experts("layers.0.mlp.experts.gate_up_proj", joined))
    assert {name: part.tolist() for name, part in parts.items()} == {
        "layers.0.mlp.experts.0.gate_proj.weight": [[1.0, 2.0]],
        "layers.0.mlp.experts.0.up_proj.weight": [[3.0, 4.0]],
        "layers.0.mlp.experts.1.gate_proj.weight": [[5.0, 6.0]],
        "layers.0.mlp.experts.1.up_proj.weight": [[7.0, 8.0]],
    }
    parts["layers.0.mlp.experts.1.up_proj.weight"].zero_()
    assert joined[1, 1].tolist() == [0.0, 0.0]


def test_shapes_in_files_are_listed_without_the_tensor() -> None:
    assert list_file_shapes("mlp.experts.down_proj", (2, 4, 3)) == [
        ("mlp.experts.0.down_proj.weight", (4, 3)),
        ("mlp.experts.1.down_proj.weight", (4, 3)),
    ]
    assert list_file_shapes("norm.weight", (4,)) == [("norm.weight", (4,))]


class Scope:
    """Records the exception with which a context ends."""

    def __init__(self) -> None:
        self.ended_with: list[type[BaseException] | None] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ended_with.append(kind)


def make_state_stream() -> tuple[StateStream, Scope, list[str]]:
    scope, abandoned = Scope(), list[str]()
    zero = torch.zeros(1)
    states = (
        TrainingState(name=name, master=zero, first_moment=zero, second_moment=zero, update_count=0)
        for name in "ab"
    )
    stream = StateStream(states, scope=scope, report_abandoned=lambda: abandoned.append("stream"))
    return stream, scope, abandoned


def test_state_stream_that_is_read_to_its_end_reports_nothing() -> None:
    for is_context in (False, True):
        stream, scope, abandoned = make_state_stream()
        with stream if is_context else nullcontext():
            assert [state.name for state in stream] == ["a", "b"]
        assert (scope.ended_with, abandoned) == ([None], [])


def test_state_stream_that_is_not_read_to_its_end_closes_its_source() -> None:
    # The source keeps offloaded tensors on the device until it is closed.
    ended = []

    def iterate() -> Iterator[TrainingState]:
        zero = torch.zeros(1)
        try:
            yield TrainingState(
                name="a", master=zero, first_moment=zero, second_moment=zero, update_count=0
            )
        finally:
            ended.append("source")

    source = iterate()
    with StateStream(source, scope=Scope()) as stream:
        next(stream)
    assert ended == ["source"]


def test_exception_of_a_loop_reports_that_the_state_stream_was_abandoned() -> None:
    stream, scope, abandoned = make_state_stream()
    loops = [stream]
    del stream

    def read() -> None:
        for _ in loops.pop():
            raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        read()
    assert abandoned == ["stream"]
    assert scope.ended_with == [GeneratorExit]


def test_context_of_a_state_stream_sees_the_exception_of_its_body() -> None:
    stream, scope, abandoned = make_state_stream()

    def read() -> NoReturn:
        with stream:
            next(stream)
            raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        read()
    assert (scope.ended_with, abandoned) == ([ValueError], [])


def test_context_that_ends_early_reports_that_the_state_stream_was_abandoned() -> None:
    stream, scope, abandoned = make_state_stream()
    with stream:
        next(stream)
    assert (scope.ended_with, abandoned) == ([None], ["stream"])
    with pytest.raises(EngineStateError, match="already used"), stream:
        pass
