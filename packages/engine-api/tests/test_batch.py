"""Test packed batches: checks, selecting, slicing and concatenating."""

import pickle
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from temper_engine_api.batch import (
    Denominators,
    SequenceBatch,
    concatenate,
    from_sequences,
    slice_sequences,
)
from temper_engine_api.errors import BatchError
from temper_engine_api.plan import build_packed_batch, plan_mini_batch

MakeBatch = Callable[..., SequenceBatch]
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def test_lengths_positions_and_index_count_from_the_starts(make_batch: MakeBatch) -> None:
    batch = make_batch([2, 3, 1])
    assert batch.sequence_starts.tolist() == [0, 2, 5, 6]
    assert batch.lengths.tolist() == [2, 3, 1]
    assert batch.sequence_index.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.get_position_ids().tolist() == [0, 1, 0, 1, 2, 0]


@given(lengths=LENGTHS, data=st.data())
def test_selecting_equals_taking_sequences_one_by_one(
    make_batch: MakeBatch, lengths: list[int], data: st.DataObject
) -> None:
    batch = make_batch(lengths)
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    chosen = batch.select(order)
    one_by_one = concatenate([slice_sequences(batch, first=i, last=i + 1) for i in order])
    assert torch.equal(chosen.tokens, one_by_one.tokens)
    assert torch.equal(chosen.sequence_starts, one_by_one.sequence_starts)
    assert torch.equal(chosen.columns["advantages"], one_by_one.columns["advantages"])
    assert torch.equal(chosen.sequence_columns["scores"], one_by_one.sequence_columns["scores"])
    assert torch.equal(chosen.sample_ids, torch.tensor(order))


def test_a_slice_copies_nothing(make_batch: MakeBatch) -> None:
    batch = make_batch([2, 3, 1])
    middle = slice_sequences(batch, first=1, last=3)
    assert middle.tokens.data_ptr() == batch.tokens[2:].data_ptr()
    assert middle.sequence_starts.tolist() == [0, 3, 4]


def test_joining_keeps_given_positions_and_counts_the_others(make_batch: MakeBatch) -> None:
    given_positions = replace(make_batch([2]), position_ids=torch.tensor([7, 8]))
    both = concatenate([given_positions, make_batch([3])])
    assert both.get_position_ids().tolist() == [7, 8, 0, 1, 2]


def test_concatenating_keeps_the_media_of_every_batch(make_batch: MakeBatch) -> None:
    text, pictures = make_batch([2]), replace(make_batch([3, 1]), media=("a", "b"))
    assert concatenate([text, pictures]).media == (None, "a", "b")
    joined = concatenate([pictures, text])
    assert joined.media == ("a", "b", None)
    assert joined.select([2, 0]).media == (None, "a")
    assert concatenate([text, text]).media is None


def test_a_batch_with_too_few_media_is_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(BatchError, match="media has 1 entries, but the batch has 2 sequences"):
        replace(make_batch([2, 3]), media=("a",))


def test_every_field_of_a_batch_declares_its_axis() -> None:
    without_axis = {field.name for field in fields(SequenceBatch) if "axis" not in field.metadata}
    assert without_axis == {"sequence_starts"}


@given(lengths=LENGTHS, dp_size=st.integers(1, 3))
def test_packing_keeps_every_column_of_every_sequence(
    make_batch: MakeBatch, lengths: list[int], dp_size: int
) -> None:
    batch = make_batch(lengths)
    batch = replace(
        batch,
        position_ids=torch.arange(3 * batch.num_tokens).reshape(3, -1),
        media=tuple(range(batch.num_sequences)),
        columns={**batch.columns, "topk": torch.randn(batch.num_tokens, 2)},
        sequence_columns={**batch.sequence_columns, "pair": torch.randn(batch.num_sequences, 2)},
    )
    plan = plan_mini_batch(lengths, dp_size=dp_size, max_tokens=10)
    counts = Denominators(tokens=1, sequences=1, groups=1)
    packed = [
        build_packed_batch(batch, plan=plan, rank=rank, denominators=counts)
        for rank in range(dp_size)
    ]
    joined = concatenate(packed)
    real = [i for i, is_dummy in enumerate(joined.is_dummy.tolist()) if not is_dummy]
    joined = joined.select(sorted(real, key=lambda i: int(joined.sample_ids[i])))
    for field in fields(SequenceBatch):
        expected, actual = getattr(batch, field.name), getattr(joined, field.name)
        if isinstance(expected, Tensor):
            assert torch.equal(actual, expected), field.name
        elif isinstance(expected, dict):
            assert all(torch.equal(actual[name], column) for name, column in expected.items()), (
                field.name
            )
        else:
            assert actual == expected, field.name


def test_batches_with_different_columns_are_not_joined(make_batch: MakeBatch) -> None:
    other = make_batch([2]).with_columns({"values": torch.zeros(2)})
    with pytest.raises(BatchError, match="different columns"):
        concatenate([make_batch([2]), other])
    with pytest.raises(BatchError, match="got no batch"):
        concatenate([])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": torch.zeros(5, dtype=torch.int32)}, r"tokens must be \[T\] int64"),
        ({"sequence_starts": torch.tensor([0, 5, 5])}, "without empty sequences"),
        ({"sequence_starts": torch.tensor([0, 2, 4])}, "must increase from 0 to 5"),
        (
            {"loss_mask": torch.tensor([False, True, True, True, True])},
            "True at the first token of a sequence",
        ),
        ({"loss_mask": torch.ones(5)}, "must be bool"),
        (
            {"columns": {"advantages": torch.zeros(4)}},
            r"column 'advantages' has shape \(4,\), but the batch has 5 tokens",
        ),
        (
            {"sequence_columns": {"scores": torch.zeros(3)}},
            r"column 'scores' has shape \(3,\), but the batch has 2 sequences",
        ),
        ({"position_ids": torch.zeros(3, 4)}, "column 'position_ids' has shape"),
    ],
)
def test_a_batch_that_breaks_its_contract_is_refused(
    make_batch: MakeBatch, change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BatchError, match=sentence):
        replace(make_batch([2, 3]), **change)  # type: ignore[arg-type]


def test_a_packed_batch_refuses_an_empty_micro_batch(make_batch: MakeBatch) -> None:
    batch = make_batch([2, 3])
    packed = build_packed_batch(
        batch,
        plan=plan_mini_batch([2, 3], dp_size=1, max_tokens=9),
        rank=0,
        denominators=Denominators(tokens=1, sequences=1, groups=1),
    )
    with pytest.raises(BatchError, match="without empty micro-batches"):
        replace(packed, micro_batch_starts=torch.tensor([0, 0, 2]))


def test_moving_keeps_every_column_and_the_type(make_batch: MakeBatch) -> None:
    batch = replace(make_batch([2, 3]), position_ids=torch.arange(5), media=("a", "b"))
    denominators = Denominators(tokens=1, sequences=1, groups=1)
    packed = build_packed_batch(
        batch,
        plan=plan_mini_batch([2, 3], dp_size=1, max_tokens=3),
        rank=0,
        denominators=denominators,
    )
    moved = packed.to("meta")
    tensors = [
        moved.tokens,
        moved.micro_batch_starts,
        moved.position_ids,
        *moved.columns.values(),
        *moved.sequence_columns.values(),
    ]
    assert type(moved) is type(packed)
    assert {tensor.device.type for tensor in tensors if tensor is not None} == {"meta"}
    assert (moved.media, moved.denominators) == (("b", "a"), denominators)


def test_a_batch_survives_pickling(make_batch: MakeBatch) -> None:
    batch = make_batch([2, 3])
    back = pickle.loads(pickle.dumps(batch))
    assert torch.equal(back.tokens, batch.tokens)
    assert back.columns.keys() == batch.columns.keys()


def test_ids_default_to_the_sample_and_temperature_to_one() -> None:
    batch = from_sequences(
        [torch.tensor([1, 2]), torch.tensor([3])],
        loss_masks=[torch.tensor([False, True]), torch.tensor([False])],
    )
    assert (
        batch.sample_ids.tolist()
        == batch.group_ids.tolist()
        == batch.pack_group_ids.tolist()
        == [0, 1]
    )
    assert batch.temperature.tolist() == [1.0, 1.0]
