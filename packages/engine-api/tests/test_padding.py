"""Test that conversion between padded mappings and packed batches is exact both ways."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, list_columns
from temper_engine_api.errors import BatchError
from temper_engine_api.padding import from_padded, to_padded

MakeBatch = Callable[..., SequenceBatch]


def assert_same(one: SequenceBatch, other: SequenceBatch) -> None:
    assert torch.equal(one.sequence_starts, other.sequence_starts)
    actual, expected = (
        {(column.field, column.name): column.tensor for column in list_columns(batch)}
        for batch in (one, other)
    )
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
        assert actual[name].dtype == tensor.dtype, name


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    extra=st.integers(0, 4),
    side=st.sampled_from(["left", "right"]),
    axes=st.sampled_from([None, 1, 3]),
)
def test_from_padded_inverts_to_padded(
    make_batch: MakeBatch,
    lengths: list[int],
    extra: int,
    side: Literal["left", "right"],
    axes: int | None,
) -> None:
    batch = make_batch(lengths, group_ids=[7] * len(lengths), temperature=0.5)
    wide = torch.arange(float(2 * batch.num_tokens)).view(-1, 2)
    batch = batch.with_columns({"wide": wide, "ids": batch.tokens + 1})
    if axes is not None:
        positions = torch.arange(axes * batch.num_tokens)
        batch = replace(batch, position_ids=positions if axes == 1 else positions.view(axes, -1))
    assert_same(from_padded(to_padded(batch, length=max(lengths) + extra, side=side)), batch)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6
    ),
)
def test_padding_on_both_sides_is_dropped(rows: list[tuple[int, int, int]]) -> None:
    width = max(sum(row) for row in rows)
    mask = torch.tensor([[0] * left + [1] * n + [0] * (width - left - n) for left, n, _ in rows])
    tokens = torch.arange(mask.numel()).view_as(mask)
    batch = from_padded({"input_ids": tokens, "attention_mask": mask})
    assert batch.tokens.tolist() == tokens[mask.bool()].tolist()
    assert batch.lengths.tolist() == [n for _, n, _ in rows]


@pytest.mark.parametrize("side", ["left", "right"])
def test_to_padded_inverts_from_padded(side: Literal["left", "right"]) -> None:
    # Left:  [0 0 5 6] [7 8 9 4]; right: [5 6 0 0] [7 8 9 4].
    short = [0, 0, 5, 6] if side == "left" else [5, 6, 0, 0]
    mask = [0, 0, 1, 1] if side == "left" else [1, 1, 0, 0]
    trained = [0, 0, 0, 1] if side == "left" else [0, 1, 0, 0]
    padded = {
        "input_ids": torch.tensor([short, [7, 8, 9, 4]]),
        "attention_mask": torch.tensor([mask, [1] * 4]),
        "loss_mask": torch.tensor([trained, [0, 0, 1, 1]]).bool(),
        "sample_ids": torch.tensor([3, 9]),
        "group_ids": torch.tensor([0, 0]),
        "pack_group_ids": torch.tensor([1, 2]),
        "temperature": torch.tensor([1.0, 0.7]),
        "advantages": torch.tensor([mask, [2, 3, 4, 5]]).float(),
        "scores": torch.tensor([0.25, 0.5]),
    }
    back = to_padded(from_padded(padded), length=4, side=side)
    assert back.keys() == padded.keys()
    assert all(torch.equal(back[name], padded[name]) for name in padded)


def test_without_a_loss_mask_all_but_the_first_token_is_trained() -> None:
    batch = from_padded(
        {
            "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        }
    )
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.temperature.tolist() == [1.0, 1.0]
    assert (
        batch.sample_ids.tolist()
        == batch.group_ids.tolist()
        == batch.pack_group_ids.tolist()
        == [0, 1]
    )


def test_one_integer_temperature_applies_to_all_rows() -> None:
    batch = from_padded({**two_rows(), "temperature": torch.tensor(2)})
    assert batch.temperature.tolist() == [2.0, 2.0]
    assert batch.temperature.dtype == torch.float32


def two_rows() -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 4]]),
        "attention_mask": torch.ones(2, 3, dtype=torch.long),
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])},
            "row 1 of attention_mask has a 0 between 1s",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
            "row 1 of attention_mask is all 0",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 2], [1, 1, 1]])},
            "attention_mask has values other than 0 and 1",
        ),
        (
            {"attention_mask": torch.ones(2, 2)},
            r"attention_mask has shape \(2, 2\), but must have the shape of input_ids, \(2, 3\)",
        ),
        (
            {"input_ids": torch.ones(2, 3)},
            r"input_ids is \(2, 3\) torch.float32, but must be \[B, L\] integers",
        ),
        ({"loss_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}, "True at the first token"),
        (
            {"loss_mask": torch.full((2, 3), 0.5)},
            "loss_mask has values other than 0 and 1: put token weights",
        ),
        (
            {"temperature": torch.ones(2, 3)},
            r"temperature has shape \(2, 3\), but must be \[\] for all rows, or \[2\]",
        ),
        (
            {"sample_ids": torch.ones(3)},
            r"sample_ids is \(3,\) torch.float32, but must be \[2\] integers",
        ),
        ({"position_ids": torch.ones(2, 2)}, "position_ids has shape"),
        (
            {"advantages": torch.ones(3, 3)},
            r"column 'advantages' has shape \(3, 3\), but must be \[2, 3\]",
        ),
        ({"advantages": torch.ones(2, 3, 4, 5)}, "column 'advantages' has shape"),
    ],
)
def test_entry_of_a_wrong_shape_is_refused(change: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        from_padded({**two_rows(), **change})


def test_a_missing_attention_mask_is_named() -> None:
    with pytest.raises(BatchError, match=r"has no attention_mask, but only \['input_ids'\]"):
        from_padded({"input_ids": torch.ones(2, 3, dtype=torch.long)})


def test_training_on_padding_is_refused() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(BatchError, match="loss_mask of row 1 is True on padding"):
        from_padded(
            {
                **two_rows(),
                "attention_mask": mask,
                "loss_mask": torch.tensor([[0, 1, 1], [0, 1, 1]]),
            }
        )


def test_a_length_below_the_longest_is_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(BatchError, match="length is 3, but the longest sequence has 5"):
        to_padded(make_batch([5, 2]), length=3)


def test_media_are_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(BatchError, match="media can't be padded"):
        to_padded(replace(make_batch([2]), media=("image",)))


def test_sequence_column_with_the_shape_of_a_token_column_is_refused(make_batch: MakeBatch) -> None:
    batch = make_batch([3, 2]).with_columns({}, {"features": torch.ones(2, 3)})
    with pytest.raises(
        BatchError,
        match=r"'features' .* which at length 3 could not be told from a per-token column",
    ):
        to_padded(batch)
    assert_same(from_padded(to_padded(batch, length=4)), batch)


def test_a_column_with_the_name_of_a_field_is_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(
        BatchError, match="'temperature' has the name of a field of the padded mapping"
    ):
        to_padded(make_batch([3]).with_columns({"temperature": torch.ones(3)}))
