"""Laws: log-probs and entropies in float32, each sequence as if it were alone, tempered before the log-softmax."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    DYNAMIC,
    SPLITS,
    WHOLE,
    Split,
    measure_outputs,
    measure_update,
    share_of,
    update_once,
)
from temper_engine_api.conformance.harness.rank import Rank, Recipe
from temper_engine_api.conformance.harness.tolerances import (
    BF16,
    EXACT,
    LOGPROB,
    SAME_PLAN,
    assert_close,
)
from temper_engine_api.conformance.harness.tolerances import (
    PEAKED as PEAKED_LOGPROB,
)
from temper_engine_api.conformance.inputs.probes import TokenProbe
from temper_engine_api.conformance.inputs.tiny_models import (
    LANGUAGE_MODELS,
    PEAKED,
    QWEN2_GROUPED,
    TinyModel,
)
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.objective import HeadOutput
from temper_engine_api.outputs import ForwardOutputs

LANGUAGE_OUTPUTS = (HeadOutput.LOGPROB, HeadOutput.ENTROPY, HeadOutput.LOGSUMEXP_TERMS)
every_query = pytest.mark.parametrize(
    "head_output",
    [
        *LANGUAGE_OUTPUTS,
        pytest.param(HeadOutput.LOGPROB_AT, marks=pytest.mark.claims(Capability.LOGPROB_AT)),
    ],
    ids=lambda head_output: head_output.value,
)


@every_query
@pytest.mark.parametrize("model", LANGUAGE_MODELS, ids=lambda model: model.name)
def test_answers_equal_the_oracle(
    subject: Subject, reference: Reference, model: TinyModel, head_output: HeadOutput
) -> None:
    recipe, batch = reference.recipe(model), reference.batch()
    outputs = subject.run(
        measure_outputs, recipe=recipe, batch=batch, requested_outputs=[head_output]
    )[0]
    assert_close(
        outputs.columns[head_output],
        reference.outputs(recipe, batch, head_output),
        LOGPROB,
        what=head_output.value,
    )


@pytest.mark.parametrize("head_output", LANGUAGE_OUTPUTS, ids=lambda head_output: head_output.value)
def test_peaked_distributions_equal_the_oracle(
    subject: Subject, reference: Reference, head_output: HeadOutput
) -> None:
    # Most mass on one token of a prime vocabulary: what is lost beside the block size of a kernel shows.
    recipe, batch = reference.recipe(PEAKED), reference.batch()
    outputs = subject.run(
        measure_outputs, recipe=recipe, batch=batch, requested_outputs=[head_output]
    )[0]
    assert_close(
        outputs.columns[head_output],
        reference.outputs(recipe, batch, head_output),
        PEAKED_LOGPROB,
        what=head_output.value,
    )


def test_packed_equals_alone(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    packed = subject.run(
        measure_outputs, recipe=recipe, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    for b in range(0, batch.num_sequences, 3):
        alone = subject.run(
            measure_outputs,
            recipe=recipe,
            batch=batch.select([b]),
            requested_outputs=[HeadOutput.LOGPROB],
        )[0]
        first, last = batch.sequence_starts[b : b + 2].tolist()
        inside = packed.columns[HeadOutput.LOGPROB][first:last]
        assert_close(
            inside, alone.columns[HeadOutput.LOGPROB], LOGPROB, what=f"log-probs of sequence {b}"
        )


def test_answers_are_independent_of_the_split(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    expected = reference.outputs(recipe, batch, HeadOutput.LOGPROB)
    for split in SPLITS:
        outputs = subject.run(
            measure_outputs,
            recipe=recipe,
            batch=batch,
            requested_outputs=[HeadOutput.LOGPROB],
            split=split,
        )[0]
        assert_close(
            outputs.columns[HeadOutput.LOGPROB],
            expected,
            LOGPROB,
            what=f"log-probs, split {split.name}",
        )


def test_given_position_ids_are_used(subject: Subject, reference: Reference) -> None:
    # Every second position: rotary attention sees only differences, so a shift alone would show nothing.
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    strided = replace(batch, position_ids=2 * batch.positions())
    expected = reference.outputs(recipe, strided, HeadOutput.LOGPROB)
    assert (
        float((expected - reference.outputs(recipe, batch, HeadOutput.LOGPROB)).abs().max()) > 0.1
    )
    for split in (WHOLE, DYNAMIC):
        outputs = subject.run(
            measure_outputs,
            recipe=recipe,
            batch=strided,
            requested_outputs=[HeadOutput.LOGPROB],
            split=split,
        )[0]
        assert_close(outputs.columns[HeadOutput.LOGPROB], expected, LOGPROB, what="log-probs")


def test_temperature_scales_logits_before_log_softmax(
    subject: Subject, reference: Reference
) -> None:
    # log p at temperature 2 is not half of log p at 1, and each sequence has its own temperature.
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    for temperature in (torch.tensor([0.5, 1.0, 2.0, 4.0] * 2), torch.tensor([1, 2, 3, 4] * 2)):
        tempered = replace(batch, temperature=temperature)
        outputs = subject.run(
            measure_outputs, recipe=recipe, batch=tempered, requested_outputs=LANGUAGE_OUTPUTS
        )[0]
        for head_output in LANGUAGE_OUTPUTS:
            expected = reference.outputs(recipe, tempered, head_output)
            assert_close(
                outputs.columns[head_output],
                expected,
                LOGPROB,
                what=f"{head_output.value} at {temperature.tolist()}",
            )


def test_asking_for_entropy_does_not_change_log_probs(
    subject: Subject, reference: Reference
) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    alone, together = (
        subject.run(
            measure_outputs, recipe=recipe, batch=batch, requested_outputs=requested_outputs
        )[0].columns[HeadOutput.LOGPROB]
        for requested_outputs in ([HeadOutput.LOGPROB], LANGUAGE_OUTPUTS)
    )
    assert_close(together, alone, EXACT, what="log-probs")


@pytest.mark.bitwise
def test_eval_twice_gives_the_same_bits(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    for first, second in subject.run(outputs_twice, recipe=recipe, batch=batch):
        for head_output in LANGUAGE_OUTPUTS:
            assert_close(
                second.columns[head_output],
                first.columns[head_output],
                EXACT,
                what=head_output.value,
            )


def outputs_twice(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> tuple[ForwardOutputs, ForwardOutputs]:
    """One after the other, the random state of the second being where the first left it."""
    first = measure_outputs(rank, recipe=recipe, batch=batch, requested_outputs=LANGUAGE_OUTPUTS)
    return first, measure_outputs(
        rank, recipe=recipe, batch=batch, requested_outputs=LANGUAGE_OUTPUTS
    )


@pytest.mark.bitwise
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_on_policy_ratio_is_exactly_one(
    subject: Subject, reference: Reference, split: Split
) -> None:
    # The old log-probs are computed with the plan of the update, so training must meet the same bits again.
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    for deviation in subject.run(
        largest_deviation_from_old, recipe=recipe, batch=batch, split=split
    ):
        assert deviation <= SAME_PLAN[subject.fleet.device].allowed


def largest_deviation_from_old(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch, split: Split
) -> float:
    """Between log-probs of ``eval_mode`` and those that training sees, at trained positions, with one plan."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = share_of(engine, batch, split=split)
    with engine.eval_mode():
        old = engine.forward_backward_batch(
            share, forward_only=True, outputs=[HeadOutput.LOGPROB]
        ).outputs
    seen = update_once(engine, [share], outputs=[HeadOutput.LOGPROB]).outputs
    if old is None or seen is None:
        return 0.0
    mask = _mask_without_dummies(share)
    distance = (seen.columns[HeadOutput.LOGPROB] - old.columns[HeadOutput.LOGPROB])[mask].abs()
    return float(distance.max()) if distance.numel() else 0.0


def _mask_without_dummies(share: SequenceBatch) -> torch.Tensor:
    return share.loss_mask[~share.is_dummy[share.sequence_index]]


def test_positions_that_nothing_trains_hold_zero(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    updates = subject.run(
        measure_update,
        recipe=recipe,
        objective=TokenProbe(),
        batch=batch,
        outputs=[HeadOutput.LOGPROB, HeadOutput.ENTROPY],
    )
    parts = [update.outputs for update in updates if update.outputs is not None]
    for head_output in (HeadOutput.LOGPROB, HeadOutput.ENTROPY):
        column = torch.cat([part.columns[head_output] for part in parts])
        nonzero = int((column != 0).sum())
        assert nonzero == int(batch.loss_mask.sum()), (
            f"{nonzero} entries of {head_output.value} are not 0"
        )


def test_the_first_token_of_a_sequence_has_no_answer(
    subject: Subject, reference: Reference
) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    outputs = subject.run(
        measure_outputs, recipe=recipe, batch=batch, requested_outputs=LANGUAGE_OUTPUTS
    )[0]
    for head_output in LANGUAGE_OUTPUTS:
        assert bool((outputs.columns[head_output][batch.sequence_starts[:-1].long()] == 0).all())


def test_one_token_sequences_are_answered(subject: Subject, reference: Reference) -> None:
    recipe = reference.recipe(QWEN2_GROUPED)
    whole = reference.batch()
    single = SequenceBatch(
        tokens=whole.tokens[:2],
        sequence_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        loss_mask=torch.zeros(2, dtype=torch.bool),
        sample_ids=torch.tensor([5, 6]),
        group_ids=torch.tensor([5, 6]),
        atom_ids=torch.tensor([5, 6]),
        temperature=torch.ones(2),
        columns={},
        sequence_columns={},
    )
    outputs: ForwardOutputs = subject.run(
        measure_outputs, recipe=recipe, batch=single, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert outputs.columns[HeadOutput.LOGPROB].tolist() == [0.0, 0.0]


def test_answers_are_float32_under_bf16_compute(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED, compute="bf16"), reference.batch()
    exact = reference.recipe(QWEN2_GROUPED)
    outputs = subject.run(
        measure_outputs, recipe=recipe, batch=batch, requested_outputs=LANGUAGE_OUTPUTS
    )[0]
    for head_output in LANGUAGE_OUTPUTS:
        column = outputs.columns[head_output]
        assert column.dtype == torch.float32
        assert not torch.equal(column, column.bfloat16().float()), (
            f"{head_output.value} was rounded to bf16"
        )
        assert_close(
            column, reference.outputs(exact, batch, head_output), BF16, what=head_output.value
        )
