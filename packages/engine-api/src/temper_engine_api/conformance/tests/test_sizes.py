"""Conformance tests of sizes: long sequences, many short ones, odd numbers of micro-batches."""

from dataclasses import replace

import pytest

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    DYNAMIC,
    FIVE_MICRO_BATCHES,
    FOUR_MICRO_BATCHES,
    ONE_MICRO_BATCH,
    THREE_MICRO_BATCHES,
    Split,
    Update,
    measure_outputs,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LONG_GRADIENT,
    Tolerance,
    assert_all_close,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, REWARD
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.oracle.oracle_comparison import check_outputs, check_update
from temper_engine_api.objective import HeadOutput, Objective

LONG = (47, 300, 129, 257, 40, 64)
"""Lengths around the powers of two at which attention and heads start another block."""
LONGER_THAN_EVERY_BLOCK = (2600, 40)
"""Longer than every block of a fixed default size: Megatron's head_chunk_tokens is 2048.

An engine that chooses the size by memory needs a layout with small blocks, as FSDPEngine has: its
head computes 159,025 positions at once with the kit's vocabulary.
"""
PROMPT_LENGTH = 5
LANGUAGE_OUTPUTS = (HeadOutput.LOGPROB, HeadOutput.ENTROPY, HeadOutput.LOGSUMEXP)


def check_language_outputs(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    batch: SequenceBatch,
    *,
    split: Split = ONE_MICRO_BATCH,
) -> None:
    """Compare all outputs of the language-model head with the oracle's."""
    check_outputs(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=batch,
        head_outputs=LANGUAGE_OUTPUTS,
        split=split,
    )


def check_gradient(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    batch: SequenceBatch,
    *,
    split: Split,
    objective: Objective | None = None,
    tolerance: Tolerance = GRADIENT,
) -> None:
    """Compare gradient and loss with the oracle's."""
    check_update(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(QWEN2_GROUPED),
        objective=objective or ClippedPpoProbe(),
        batch=batch,
        split=split,
        tolerance=tolerance,
    )


def test_positions_count_up_to_the_end_of_a_long_sequence(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare outputs with the oracle for one sequence with 300 tokens.

    Positions that wrap around, for example at the length of a table, differ here.
    """
    batch = oracle.get_batch_of(LONG, prompt_length=PROMPT_LENGTH).select([LONG.index(300)])
    check_language_outputs(engine_under_test, oracle, batch)


def test_long_sequences_do_not_see_each_other(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare packed outputs with the oracle, sequence by sequence, for lengths 40 to 300.

    Attention may take another path for long sequences than for short ones.
    """
    batch = oracle.get_batch_of(LONG, prompt_length=PROMPT_LENGTH)
    for split in (ONE_MICRO_BATCH, DYNAMIC):
        check_language_outputs(engine_under_test, oracle, batch, split=split)


def test_no_output_is_lost_at_a_block_boundary(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that only first tokens have log-prob 0 in a pack of 837 tokens.

    A head that computes blocks of positions may drop a block's first or last one.
    """
    setup = oracle.make_setup(QWEN2_GROUPED)
    batch = oracle.get_batch_of(LONG, prompt_length=PROMPT_LENGTH)
    outputs = engine_under_test.run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    zeros = (outputs.columns[HeadOutput.LOGPROB] == 0).nonzero()[:, 0]
    assert zeros.tolist() == batch.sequence_starts[:-1].tolist()


def test_gradient_of_long_sequences_matches_oracle(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare gradient and loss with the oracle's for sequences of 40 to 300 tokens."""
    batch = oracle.get_batch_of(LONG, prompt_length=PROMPT_LENGTH)
    check_gradient(
        engine_under_test,
        oracle,
        batch,
        split=ONE_MICRO_BATCH,
        objective=ClippedPpoProbe(entropy_coefficient=0.1),
        tolerance=LONG_GRADIENT,
    )


@pytest.mark.thorough
def test_sequence_longer_than_every_block_matches_oracle(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare outputs, gradient and loss with the oracle's for a sequence of 2600 tokens."""
    batch = oracle.get_batch_of(LONGER_THAN_EVERY_BLOCK, prompt_length=PROMPT_LENGTH)
    check_language_outputs(engine_under_test, oracle, batch)
    check_gradient(engine_under_test, oracle, batch, split=ONE_MICRO_BATCH, tolerance=LONG_GRADIENT)


def test_each_of_24_short_sequences_has_its_own_temperature(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare a micro-batch of 24 sequences, each with one trained token, with the oracle.

    Sequences beyond the sixteenth may get another sequence's temperature or none.
    """
    batch = oracle.get_batch_of((2,) * 24, prompt_length=1)
    assert float(batch.temperature[-1]) != 1.0
    check_language_outputs(engine_under_test, oracle, batch)
    check_gradient(engine_under_test, oracle, batch, split=ONE_MICRO_BATCH)


def test_24_one_token_sequences_have_log_prob_zero(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that log-probs are 0 for a micro-batch with 24 one-token sequences."""
    batch = oracle.get_batch_of((1,) * 24, prompt_length=1)
    outputs = engine_under_test.run(
        measure_outputs,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=batch,
        requested_outputs=[HeadOutput.LOGPROB],
    )[0]
    assert outputs.columns[HeadOutput.LOGPROB].tolist() == [0.0] * 24


@pytest.mark.if_claimed(Capability.REWARD_MODEL)
def test_24_one_token_sequences_have_their_own_scores(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare scores with the oracle for 24 one-token sequences."""
    check_outputs(
        engine_under_test,
        oracle,
        setup=oracle.make_setup(REWARD),
        batch=oracle.get_batch_of((1,) * 24, prompt_length=1),
        head_outputs=[HeadOutput.SCORE],
    )


@pytest.mark.parametrize(
    "split", [THREE_MICRO_BATCHES, FIVE_MICRO_BATCHES], ids=lambda split: split.name
)
def test_odd_numbers_of_micro_batches_count_each_one_once(
    engine_under_test: EngineUnderTest, oracle: OracleCache, split: Split
) -> None:
    """Compare gradient and loss with the oracle for three and for five micro-batches."""
    check_gradient(engine_under_test, oracle, oracle.get_batch(num_sequences=10), split=split)


def test_three_micro_batches_of_a_call_that_is_not_final_count_fully(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare two calls of three micro-batches each with one call on all samples.

    The first call has `final=False`.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch(num_sequences=12)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    update = engine_under_test.run(
        update_in_two_calls_of_three_micro_batches, setup=setup, batch=batch
    )[0]
    assert_all_close(update.gradients, expected.gradients, GRADIENT, quantity="gradient")


def update_in_two_calls_of_three_micro_batches(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> Update:
    """Train on the first half, then on the second, with the denominators of the full batch."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    denominators = rank_slice(engine, batch, split=ONE_MICRO_BATCH).denominators
    middle = batch.num_sequences // 2
    halves = [batch.select(range(middle)), batch.select(range(middle, batch.num_sequences))]
    return run_update(
        engine,
        [
            replace(rank_slice(engine, half, split=THREE_MICRO_BATCHES), denominators=denominators)
            for half in halves
        ],
    )


def test_entropy_of_a_lone_sequence_has_a_gradient(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare the gradient with the oracle for one-sequence micro-batches, with entropies."""
    batch = oracle.get_batch_of((9, 14, 6, 11), prompt_length=3, are_pairs=False)
    check_gradient(
        engine_under_test,
        oracle,
        batch,
        split=FOUR_MICRO_BATCHES,
        objective=ClippedPpoProbe(entropy_coefficient=0.1),
    )
