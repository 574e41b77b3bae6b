"""Test the reduction of losses: each mode by hand, independence of the split, and masked NaN."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.batch import Denominators, SequenceBatch, from_sequences, slice_sequences
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import Aggregation, AggregationMode, LossTerms
from temper_engine_api.reduction import count_denominators, reduce_loss

MakeBatch = Callable[..., SequenceBatch]
MODES = [
    Aggregation(mode=AggregationMode.TOKEN_MEAN),
    Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN),
    Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_SUM),
    Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM, horizon=8),
    Aggregation(mode=AggregationMode.TOKEN_SUM),
]
BY_NAME = [mode.mode.value for mode in MODES]


def three_sequences() -> tuple[SequenceBatch, torch.Tensor]:
    """Return a batch and losses [1, 2, 3], [10] and none; untrained tokens have other numbers."""
    masks = [[False, True, True, True], [False, True, False], [False, False]]
    batch = from_sequences(
        [torch.zeros(len(m)) for m in masks],
        loss_masks=[torch.tensor(m) for m in masks],
        group_ids=[0, 0, 1],
    )
    return batch, torch.tensor([50.0, 1, 2, 3, 60, 10, 70, 80, 90])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (MODES[0], 4.0),  # (1 + 2 + 3 + 10) / 4 tokens
        (MODES[1], 6.0),  # (6 / 3 + 10 / 1) / 2 sequences that train
        (MODES[2], 8.0),  # (6 + 10) / 2
        (MODES[3], 1.0),  # (6 / 8 + 10 / 8) / 2
        (MODES[4], 16.0),  # 1 + 2 + 3 + 10
    ],
    ids=BY_NAME,
)
def test_each_aggregation_mode_divides_by_its_denominator(
    aggregation: Aggregation, expected: float
) -> None:
    batch, loss = three_sequences()
    reduced = reduce_loss(
        LossTerms(loss=loss), batch, denominators=count_denominators(batch), aggregation=aggregation
    )
    assert reduced.item() == expected


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    list(zip(MODES, [6.0, 6.0, 6.0, 0.75, 6.0], strict=True)),
    ids=BY_NAME,
)
def test_loss_of_a_single_token_is_divided_by_one(
    aggregation: Aggregation, expected: float
) -> None:
    batch = from_sequences([torch.zeros(2)], loss_masks=[torch.tensor([False, True])])
    terms = LossTerms(loss=torch.tensor([50.0, 6.0]))
    assert (
        reduce_loss(
            terms, batch, denominators=count_denominators(batch), aggregation=aggregation
        ).item()
        == expected
    )


def test_denominators_count_what_is_trained() -> None:
    batch, _ = three_sequences()
    assert count_denominators(batch) == Denominators(tokens=4, sequences=2, groups=1)


def test_sequence_losses_are_averaged_over_trained_sequences_and_pairs_over_groups() -> None:
    batch, _ = three_sequences()
    terms = LossTerms(loss=torch.tensor([3.0, 5.0, 99.0]), level="sequence")
    denominators = count_denominators(batch)
    by_sequence = reduce_loss(terms, batch, denominators=denominators, aggregation=MODES[2])
    by_group = reduce_loss(
        terms,
        batch,
        denominators=denominators,
        aggregation=Aggregation(mode=AggregationMode.GROUP_MEAN),
    )
    assert (by_sequence.item(), by_group.item()) == (4.0, 8.0)  # (3 + 5) / 2, (3 + 5) / 1


def test_weights_scale_the_loss_and_never_the_denominator() -> None:
    batch, loss = three_sequences()
    weight = torch.tensor([9.0, 2, 0, 0, 9, 0, 9, 9, 9])
    terms = LossTerms(loss=loss, weight=weight)
    assert (
        reduce_loss(
            terms, batch, denominators=count_denominators(batch), aggregation=MODES[0]
        ).item()
        == 0.5
    )  # 2 * 1 / 4


@pytest.mark.parametrize("aggregation", MODES, ids=BY_NAME)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9), data=st.data())
def test_the_loss_does_not_depend_on_the_split(
    make_batch: MakeBatch, aggregation: Aggregation, lengths: list[int], data: st.DataObject
) -> None:
    batch = make_batch(lengths)
    denominators = count_denominators(batch)
    loss = torch.linspace(-1, 2, batch.num_tokens, requires_grad=True)
    reduced = reduce_loss(
        LossTerms(loss=loss), batch, denominators=denominators, aggregation=aggregation
    )
    (expected,) = torch.autograd.grad(reduced, loss)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=4)) | {0, len(lengths)})
    for first, last in pairwise(cuts):
        a, b = int(batch.sequence_starts[first]), int(batch.sequence_starts[last])
        part = slice_sequences(batch, first=first, last=last)
        reduce_loss(
            LossTerms(loss=loss[a:b]), part, denominators=denominators, aggregation=aggregation
        ).backward()
    assert loss.grad is not None
    torch.testing.assert_close(loss.grad, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("aggregation", MODES, ids=BY_NAME)
def test_all_masked_gives_zero_and_finite_zero_gradients(aggregation: Aggregation) -> None:
    batch = from_sequences([torch.zeros(3)], loss_masks=[torch.zeros(3, dtype=torch.bool)])
    loss = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    reduced = reduce_loss(
        LossTerms(loss=loss), batch, denominators=count_denominators(batch), aggregation=aggregation
    )
    reduced.backward()
    assert reduced.item() == 0.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("aggregation", MODES, ids=BY_NAME)
def test_nan_outside_the_mask_never_leaks(aggregation: Aggregation) -> None:
    batch, loss = three_sequences()
    poisoned = torch.where(batch.loss_mask, loss, torch.nan).requires_grad_()
    weight = torch.where(batch.loss_mask, 1.0, torch.nan)
    denominators = count_denominators(batch)
    clean = reduce_loss(
        LossTerms(loss=loss), batch, denominators=denominators, aggregation=aggregation
    )
    dirty = reduce_loss(
        LossTerms(loss=poisoned, weight=weight),
        batch,
        denominators=denominators,
        aggregation=aggregation,
    )
    dirty.backward()
    assert dirty.item() == clean.item()
    assert poisoned.grad is not None
    assert poisoned.grad.isfinite().all()


def test_weights_carry_no_gradient() -> None:
    batch, loss = three_sequences()
    weight = torch.ones(9, requires_grad=True)
    terms = LossTerms(loss=loss.requires_grad_(), weight=weight)
    reduce_loss(
        terms, batch, denominators=count_denominators(batch), aggregation=MODES[0]
    ).backward()
    assert weight.grad is None


def test_sums_are_float32_for_half_precision_losses() -> None:
    batch, loss = three_sequences()
    reduced = reduce_loss(
        LossTerms(loss=loss.bfloat16()),
        batch,
        denominators=count_denominators(batch),
        aggregation=MODES[0],
    )
    assert reduced.dtype == torch.float32


@pytest.mark.parametrize(
    ("terms", "mode", "sentence"),
    [
        (
            LossTerms(loss=torch.zeros(3)),
            AggregationMode.TOKEN_MEAN,
            r"losses of shape \(3,\) at token level, but the batch needs \(9,\)",
        ),
        (
            LossTerms(loss=torch.zeros(9), weight=torch.ones(1)),
            AggregationMode.TOKEN_MEAN,
            r"weights of shape \(1,\)",
        ),
        (
            LossTerms(loss=torch.zeros(9)),
            AggregationMode.GROUP_MEAN,
            "group_mean needs one loss per sequence",
        ),
        (
            LossTerms(loss=torch.zeros(3), level="sequence"),
            AggregationMode.TOKEN_MEAN,
            "token_mean needs one loss per token",
        ),
        (
            LossTerms(loss=torch.zeros(3), level="sequence"),
            AggregationMode.TOKEN_SUM,
            "token_sum needs one loss per token",
        ),
    ],
)
def test_terms_that_do_not_fit_are_refused(
    terms: LossTerms, mode: AggregationMode, sentence: str
) -> None:
    batch, _ = three_sequences()
    with pytest.raises(BatchError, match=sentence):
        reduce_loss(
            terms, batch, denominators=count_denominators(batch), aggregation=Aggregation(mode=mode)
        )
