"""Sequences laid end to end: what is checked, selected, sliced and joined."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.batch import Denominators, SequenceBatch, concatenate, from_sequences, slice_sequences
from temper_engine_api.errors import BatchError
from temper_engine_api.plan import pack_rank, plan_mini_batch

MakeBatch = Callable[..., SequenceBatch]
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def test_lengths_positions_and_index_count_from_the_starts(make_batch: MakeBatch) -> None:
    batch = make_batch([2, 3, 1])
    assert batch.sequence_starts.tolist() == [0, 2, 5, 6]
    assert batch.lengths.tolist() == [2, 3, 1]
    assert batch.sequence_index.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.positions().tolist() == [0, 1, 0, 1, 2, 0]


@given(lengths=LENGTHS, data=st.data())
def test_selecting_equals_taking_sequences_one_by_one(make_batch: MakeBatch, lengths: list[int], data: st.DataObject) -> None:
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
    assert both.positions().tolist() == [7, 8, 0, 1, 2]


def test_batches_with_different_columns_are_not_joined(make_batch: MakeBatch) -> None:
    other = make_batch([2]).with_columns({"values": torch.zeros(2)})
    with pytest.raises(BatchError, match="different columns"):
        concatenate([make_batch([2]), other])
    with pytest.raises(BatchError, match="no batch to concatenate"):
        concatenate([])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": torch.zeros(5, dtype=torch.int32)}, r"tokens must be \[T\] int64"),
        ({"sequence_starts": torch.tensor([0, 5, 5])}, "without empty sequences"),
        ({"sequence_starts": torch.tensor([0, 2, 4])}, "must rise from 0 to 5"),
        ({"loss_mask": torch.tensor([False, True, True, True, True])}, "True at the first token of a sequence"),
        ({"loss_mask": torch.ones(5)}, "loss_mask must be bool"),
        ({"columns": {"advantages": torch.zeros(4)}}, r"column 'advantages' has shape \(4,\), but there are 5 tokens"),
        ({"sequence_columns": {"scores": torch.zeros(3)}}, r"column 'scores' has shape \(3,\), but there are 2 sequences"),
        ({"position_ids": torch.zeros(3, 4)}, "position_ids has shape"),
    ],
)
def test_a_batch_that_breaks_its_contract_is_refused(make_batch: MakeBatch, change: dict[str, object], sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        replace(make_batch([2, 3]), **change)  # type: ignore[arg-type]


def test_a_packed_batch_refuses_an_empty_micro_batch(make_batch: MakeBatch) -> None:
    batch = make_batch([2, 3])
    packed = pack_rank(
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
    packed = pack_rank(batch, plan=plan_mini_batch([2, 3], dp_size=1, max_tokens=3), rank=0, denominators=denominators)
    moved = packed.to("meta")
    tensors = [moved.tokens, moved.micro_batch_starts, moved.position_ids, *moved.columns.values(), *moved.sequence_columns.values()]
    assert type(moved) is type(packed)
    assert {tensor.device.type for tensor in tensors if tensor is not None} == {"meta"}
    assert (moved.media, moved.denominators) == (("b", "a"), denominators)


def test_a_batch_survives_pickling(make_batch: MakeBatch) -> None:
    batch = make_batch([2, 3])
    back = pickle.loads(pickle.dumps(batch))
    assert torch.equal(back.tokens, batch.tokens)
    assert back.columns.keys() == batch.columns.keys()


def test_ids_default_to_the_sample_and_temperature_to_one() -> None:
    batch = from_sequences([torch.tensor([1, 2]), torch.tensor([3])], loss_masks=[torch.tensor([False, True]), torch.tensor([False])])
    assert batch.sample_ids.tolist() == batch.group_ids.tolist() == batch.atom_ids.tolist() == [0, 1]
    assert batch.temperature.tolist() == [1.0, 1.0]
