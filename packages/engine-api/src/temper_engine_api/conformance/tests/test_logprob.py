"""Conformance tests of log-probs and entropies: packing, temperature, float32."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    DYNAMIC,
    ONE_MICRO_BATCH,
    SPLITS,
    Split,
    measure_outputs,
    measure_update,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    BF16,
    EXACT,
    GRADIENT,
    LOGPROB,
    SAME_LOGITS,
    SAME_PLAN,
    assert_all_close,
    assert_close,
)
from temper_engine_api.conformance.harness.tolerances import (
    PEAKED as PEAKED_LOGPROB,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe, SftProbe
from temper_engine_api.conformance.inputs.tiny_models import (
    LANGUAGE_MODELS,
    PEAKED,
    QWEN2_GROUPED,
    TinyModel,
)
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.oracle.oracle_comparison import check_outputs
from temper_engine_api.objective import HeadOutput
from temper_engine_api.outputs import ForwardOutputs

LANGUAGE_OUTPUTS = (HeadOutput.LOGPROB, HeadOutput.ENTROPY, HeadOutput.LOGSUMEXP)
every_query = pytest.mark.parametrize(
    "head_output",
    [
        *LANGUAGE_OUTPUTS,
        pytest.param(HeadOutput.LOGPROB_AT, marks=pytest.mark.if_claimed(Capability.LOGPROB_AT)),
    ],
    ids=lambda head_output: head_output.value,
)


@every_query
@pytest.mark.parametrize("model", LANGUAGE_MODELS, ids=lambda model: model.name)
def test_head_outputs_match_oracle(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    model: TinyModel,
    head_output: HeadOutput,
) -> None:
    """Compare log-probs, entropies and log-sum-exps with the oracle, for every tiny model."""
    check_outputs(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(model),
        batch=oracle.get_batch(),
        head_outputs=[head_output],
    )


def test_outputs_requested_together_match_oracle(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Each head output has the same values next to all others as on its own."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    requested = list(LANGUAGE_OUTPUTS)
    if Capability.LOGPROB_AT in engine_under_test.capabilities:
        requested.append(HeadOutput.LOGPROB_AT)
    check_outputs(engine_under_test, oracle, setup=setup, batch=batch, head_outputs=requested)


@pytest.mark.parametrize("head_output", LANGUAGE_OUTPUTS, ids=lambda head_output: head_output.value)
def test_peaked_distributions_match_oracle(
    engine_under_test: EngineUnderTest, oracle: OracleCache, head_output: HeadOutput
) -> None:
    """Compare head outputs when almost all probability is on one token.

    The vocabulary size is prime, so a kernel that drops its last partial block of columns fails.
    """
    check_outputs(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(PEAKED),
        batch=oracle.get_batch(),
        head_outputs=[head_output],
        tolerance=PEAKED_LOGPROB,
    )


def test_packed_sequence_equals_unpacked(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A sequence gets the same log-probs when packed with others as in a separate batch."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    packed = engine_under_test.run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    for b in range(0, batch.num_sequences, 3):
        unpacked = engine_under_test.run(
            measure_outputs,
            setup=setup,
            batch=batch.select([b]),
            requested_outputs=[HeadOutput.LOGPROB],
        )[0]
        first, last = batch.sequence_starts[b : b + 2].tolist()
        packed_slice = packed.columns[HeadOutput.LOGPROB][first:last]
        assert_close(
            packed_slice,
            unpacked.columns[HeadOutput.LOGPROB],
            LOGPROB,
            quantity=f"log-probs of sequence {b}",
            batch=batch.select([b]),
        )


def test_logprobs_do_not_depend_on_micro_batches(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Every split into micro-batches gives the oracle's log-probs."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    for split in SPLITS:
        outputs = engine_under_test.run(
            measure_outputs,
            setup=setup,
            batch=batch,
            requested_outputs=[HeadOutput.LOGPROB],
            split=split,
        )[0]
        assert_close(
            outputs.columns[HeadOutput.LOGPROB],
            expected,
            LOGPROB,
            quantity=f"log-probs, split {split.name}",
            batch=batch,
            num_ranks=engine_under_test.num_data_ranks,
        )


def test_custom_position_ids_are_used(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Pass doubled position ids and compare log-probs and gradient with the oracle's.

    Rotary embeddings only see differences between positions, so a constant shift would not show
    whether an engine ignores the ids.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    strided = replace(batch, position_ids=2 * batch.get_position_ids())
    expected = oracle.get_outputs(setup, strided, HeadOutput.LOGPROB)
    assert (
        # Without this difference, an engine that ignores the ids could pass within the tolerance.
        float((expected - oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)).abs().max()) > 0.1
    )
    for split in (ONE_MICRO_BATCH, DYNAMIC):
        outputs = engine_under_test.run(
            measure_outputs,
            setup=setup,
            batch=strided,
            requested_outputs=[HeadOutput.LOGPROB],
            split=split,
        )[0]
        assert_close(
            outputs.columns[HeadOutput.LOGPROB],
            expected,
            LOGPROB,
            quantity="log-probs",
            batch=batch,
            num_ranks=engine_under_test.num_data_ranks,
        )
    update = engine_under_test.run(
        measure_update, setup=setup, objective=SftProbe(), batch=strided
    )[0]
    assert_all_close(
        update.gradients,
        oracle.get_update(setup, SftProbe(), strided).gradients,
        GRADIENT,
        quantity="gradient",
    )


def test_temperature_scales_logits_before_log_softmax(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Logits are divided by each sequence's own temperature before the log-softmax.

    Dividing log-probs instead gives other numbers: log p at temperature 2 is not half of log p at
    1.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    # One temperature for all sequences would not show that an engine reads only the first.
    for temperature in (torch.tensor([0.5, 1.0, 2.0, 4.0] * 2), torch.tensor([1, 2, 3, 4] * 2)):
        tempered = replace(batch, temperature=temperature)
        check_outputs(
            engine_under_test,
            oracle,
            setup=setup,
            batch=tempered,
            head_outputs=LANGUAGE_OUTPUTS,
        )


def test_requesting_entropy_does_not_change_logprobs(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Log-probs are bitwise equal with and without entropy and log-sum-exp in the same call."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    without_entropy, with_entropy = (
        engine_under_test.run(
            measure_outputs, setup=setup, batch=batch, requested_outputs=requested_outputs
        )[0].columns[HeadOutput.LOGPROB]
        for requested_outputs in ([HeadOutput.LOGPROB], LANGUAGE_OUTPUTS)
    )
    # Exact: asking for a metric must not move the on-policy ratio away from 1.
    assert_close(
        with_entropy,
        without_entropy,
        EXACT,
        quantity="log-probs",
        batch=batch,
        num_ranks=engine_under_test.num_data_ranks,
    )


@pytest.mark.bitwise
def test_repeated_eval_is_bitwise_equal(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Two forward passes in `eval_mode` give the same bits on every rank.

    A difference means that something random, such as dropout, is active in eval mode.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    for first, second in engine_under_test.run(outputs_twice, setup=setup, batch=batch):
        for head_output in LANGUAGE_OUTPUTS:
            assert_close(
                second.columns[head_output],
                first.columns[head_output],
                EXACT,
                quantity=head_output.value,
                batch=batch,
                num_ranks=engine_under_test.num_data_ranks,
            )


def outputs_twice(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[ForwardOutputs, ForwardOutputs]:
    """Run two forward passes without resetting the RNG in between."""
    first = measure_outputs(rank, setup=setup, batch=batch, requested_outputs=LANGUAGE_OUTPUTS)
    return first, measure_outputs(
        rank, setup=setup, batch=batch, requested_outputs=LANGUAGE_OUTPUTS
    )


@pytest.mark.bitwise
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_on_policy_ratio_is_exactly_one(
    engine_under_test: EngineUnderTest, oracle: OracleCache, split: Split
) -> None:
    """Log-probs from `eval_mode` and training are equal bit for bit, for one plan and weights.

    The old log-probs of PPO come from `eval_mode`; any difference makes the on-policy ratio differ
    from 1. On CUDA a small difference is allowed, see `SAME_PLAN`.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    for deviation in engine_under_test.run(
        largest_deviation_from_old, setup=setup, batch=batch, split=split
    ):
        assert deviation <= SAME_PLAN[engine_under_test.rank_pool.device].allowed


def largest_deviation_from_old(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, split: Split
) -> float:
    """Return the largest difference of eval and training log-probs at trained positions."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=split)
    with engine.eval_mode():
        old = engine.forward_backward_batch(
            local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB]
        ).outputs
    seen = run_update(engine, [local_batch], outputs=[HeadOutput.LOGPROB]).outputs
    # This rank returns no outputs; the ranks that do compare them.
    if old is None or seen is None:
        return 0.0
    mask = _mask_without_dummies(local_batch)
    distance = (seen.columns[HeadOutput.LOGPROB] - old.columns[HeadOutput.LOGPROB])[mask].abs()
    return float(distance.max()) if distance.numel() else 0.0


def _mask_without_dummies(local_batch: SequenceBatch) -> torch.Tensor:
    # Outputs leave dummy samples out, so the mask has to as well.
    return local_batch.loss_mask[~local_batch.is_dummy[local_batch.sequence_index]]


def test_untrained_positions_are_zero(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Outputs in training are 0 wherever the loss mask is False."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    updates = engine_under_test.run(
        measure_update,
        setup=setup,
        objective=ClippedPpoProbe(),
        batch=batch,
        outputs=[HeadOutput.LOGPROB, HeadOutput.ENTROPY],
    )
    parts = [update.outputs for update in updates if update.outputs is not None]
    for head_output in (HeadOutput.LOGPROB, HeadOutput.ENTROPY):
        column = torch.cat([part.columns[head_output] for part in parts])
        # No trained token of this batch has log-prob or entropy 0, so counting is enough.
        nonzero = int((column != 0).sum())
        assert nonzero == int(batch.loss_mask.sum()), (
            f"{nonzero} entries of {head_output.value} are not 0"
        )


def test_first_token_of_a_sequence_is_zero(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The outputs of a sequence's first token are 0, since no position predicts it."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    outputs = engine_under_test.run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=LANGUAGE_OUTPUTS
    )[0]
    for head_output in LANGUAGE_OUTPUTS:
        assert bool((outputs.columns[head_output][batch.sequence_starts[:-1].long()] == 0).all())


def test_one_token_sequences_are_accepted(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Sequences of a single token give log-prob 0 and no error."""
    setup = oracle.make_setup(QWEN2_GROUPED)
    batch = oracle.get_batch()
    single = SequenceBatch(
        tokens=batch.tokens[:2],
        sequence_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        loss_mask=torch.zeros(2, dtype=torch.bool),
        sample_ids=torch.tensor([5, 6]),
        group_ids=torch.tensor([5, 6]),
        pack_group_ids=torch.tensor([5, 6]),
        temperature=torch.ones(2),
        columns={},
        sequence_columns={},
    )
    outputs: ForwardOutputs = engine_under_test.run(
        measure_outputs, setup=setup, batch=single, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert outputs.columns[HeadOutput.LOGPROB].tolist() == [0.0, 0.0]


def test_head_outputs_are_float32_under_bf16(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Head outputs are float32 with bf16 compute, and not rounded to bf16 on the way.

    They also differ from those with float32 compute, so that bf16 has an effect.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED, compute="bf16"), oracle.get_batch()
    exact = oracle.make_setup(QWEN2_GROUPED)
    outputs = engine_under_test.run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=LANGUAGE_OUTPUTS
    )[0]
    for head_output in LANGUAGE_OUTPUTS:
        column = outputs.columns[head_output]
        assert column.dtype == torch.float32
        # Values that were bf16 on the way survive this round trip unchanged, float32 values do not.
        assert not torch.equal(column, column.bfloat16().float()), (
            f"{head_output.value} was rounded to bf16"
        )
        expected = oracle.get_outputs(exact, batch, head_output)
        distance = float((column - expected).abs().max())
        assert distance > 1e-3, (
            f"{head_output.value} differs from that with float32 compute by only {distance}; "
            "expected more than 1e-3. Apply precision.compute."
        )
        assert_close(
            column,
            expected,
            BF16,
            quantity=head_output.value,
            batch=batch,
            num_ranks=engine_under_test.num_data_ranks,
        )


def test_temperatures_are_not_rounded_under_bf16(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The head divides by float32 temperatures with bf16 compute; rounded ones are off by 0.3 %.

    A log-prob plus its log-sum-exp is the label's logit divided by the temperature. The logit does
    not depend on the temperature, so its product with the temperature must not either. This is
    exact up to float32 rounding, where a comparison with the oracle needs the tolerance of bf16.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED, compute="bf16"), oracle.get_batch()
    logits = []
    # bf16 represents 2.0, and rounds 1.0035 to 1.0 and 2.0085 to 2.0156.
    for temperature in (torch.tensor([2.0] * 8), torch.tensor([1.0035, 2.0085] * 4)):
        tempered = replace(batch, temperature=temperature)
        outputs = engine_under_test.run(
            measure_outputs,
            setup=setup,
            batch=tempered,
            requested_outputs=[HeadOutput.LOGPROB, HeadOutput.LOGSUMEXP],
        )[0]
        sums = outputs.columns[HeadOutput.LOGPROB] + outputs.columns[HeadOutput.LOGSUMEXP]
        logits.append(sums * temperature[batch.sequence_index])
    assert_close(
        logits[1],
        logits[0],
        SAME_LOGITS,
        quantity="the label's logit, computed as temperature * (log-prob + log-sum-exp)",
        batch=batch,
        num_ranks=engine_under_test.num_data_ranks,
    )
