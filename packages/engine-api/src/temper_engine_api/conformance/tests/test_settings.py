"""Conformance tests of an engine's settings: each takes effect, or is rejected."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    THREE_MICRO_BATCHES,
    collect_weights,
    measure_outputs,
    measure_update,
    measure_updates,
    merge_update_metrics,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    BF16,
    LOSS,
    UPDATE,
    assert_all_close,
    assert_all_equal,
    assert_close,
)
from temper_engine_api.conformance.inputs.counting_sgd import CountingSgd
from temper_engine_api.conformance.inputs.probes import (
    DETERMINISM_METRIC,
    ClippedPpoProbe,
    DeterminismProbe,
)
from temper_engine_api.conformance.inputs.tiny_models import OTHER_SHAPES, QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.tests.test_capability import read_init_error
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import CheckpointError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import OptimizerSpec
from temper_engine_api.weights import NamedWeight

SGD = OptimizerSpec(name="torch.optim.SGD", lr=0.1, weight_decay=0.0, clip_grad_norm=None)
DECAYING_SGD = replace(SGD, weight_decay=0.5, arguments={"momentum": 0.9})
CLIPPED_SGD = replace(DECAYING_SGD, clip_grad_norm=0.5)
COUNTING_SGD = replace(DECAYING_SGD, name=f"{CountingSgd.__module__}.{CountingSgd.__name__}")
MIN_ENTRIES = 64
"""A tensor with fewer entries may happen to have none that bf16 cannot represent."""


def is_rejected_by_the_layout(engine_under_test: EngineUnderTest, setup: EngineSetup) -> bool:
    """Return whether the layout rejects a claimed setting; the message names the conflict."""
    message = engine_under_test.run(read_init_error, setup=setup)[0]
    assert not message or any(name in message for name in engine_under_test.layout.fields), message
    return bool(message)


def is_rounded_to_bf16(tensor: Tensor) -> bool:
    """Return whether bf16 represents all entries."""
    return torch.equal(tensor, tensor.bfloat16().float())


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_allows_only_deterministic_kernels(
    engine_under_test: EngineUnderTest, oracle: OracleCache, deterministic: bool
) -> None:
    """Check that torch allows only deterministic kernels if and only if `deterministic` is True."""
    setup = oracle.make_setup(QWEN2_GROUPED, deterministic=deterministic)
    updates = engine_under_test.run(
        measure_update, setup=setup, objective=DeterminismProbe(), batch=oracle.get_batch()
    )
    assert merge_update_metrics(updates)[DETERMINISM_METRIC] == float(deterministic)


@pytest.mark.if_claimed(Capability.ANY_OPTIMIZER)
def test_first_update_of_sgd_is_lr_times_the_gradient(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that torch.optim.SGD moves every weight by -lr times its gradient."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=SGD, compute="fp32")
    if is_rejected_by_the_layout(engine_under_test, setup):
        return
    batch = oracle.get_batch()
    # The oracle does not change its weights here, and returns the gradient.
    reference = oracle.get_update(oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), batch)
    weights = engine_under_test.run(train_and_export, setup=setup, batch=batch)[0]
    for name, weight in weights.items():
        expected = reference.masters[name] - SGD.lr * reference.gradients[name]
        assert_close(weight, expected, UPDATE, quantity=f"{name} after one update of SGD")


def train_and_export(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, saves_to: Path | None = None
) -> dict[str, Tensor]:
    """Return the exported weights after one update; save a checkpoint if a folder is given."""
    engine = rank.temporary_engine(setup)
    update_weights(engine, batch)
    if saves_to is not None:
        engine.save_checkpoint(str(saves_to), global_step=1)
    return collect_weights(engine)


def update_weights(engine: BaseEngine, batch: SequenceBatch) -> None:
    """Run one update; `run_update` would export a state that only AdamW has."""
    engine.set_loss_fn(ClippedPpoProbe())
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
        )
    engine.optimizer_step()


@pytest.mark.if_claimed(Capability.ANY_OPTIMIZER)
def test_two_updates_of_sgd_match_those_by_hand(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare two updates of torch.optim.SGD with momentum, decay and clipping with the formula."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=CLIPPED_SGD, compute="fp32")
    if is_rejected_by_the_layout(engine_under_test, setup):
        return
    batches = [oracle.get_batch(), oracle.get_batch(seed=1)]
    expected = oracle.run(
        compute_sgd_by_hand, setup=oracle.make_setup(QWEN2_GROUPED), batches=batches
    )
    weights, _ = engine_under_test.run(train_with_skips, setup=setup, batches=batches)[0]
    assert_all_close(weights, expected, UPDATE, quantity="weights after two updates of SGD")


def compute_sgd_by_hand(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> dict[str, Tensor]:
    """Return the weights after one update of CLIPPED_SGD per batch.

    With the gradient g clipped to the limit, as torch.optim.SGD: v <- momentum v + g + decay w and
    w <- w - lr v, where only matrices decay. The setup leaves the gradient in the first moments.
    """
    engine = rank.temporary_engine(setup)
    limit, momentum = CLIPPED_SGD.clip_grad_norm, float(str(CLIPPED_SGD.arguments["momentum"]))
    assert limit is not None
    engine.set_loss_fn(ClippedPpoProbe())
    weights, velocities = collect_weights(engine), dict[str, Tensor]()
    for batch in batches:
        update = run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])
        assert update.grad_norm > limit, "the gradient must be large enough to be clipped"
        for name, weight in weights.items():
            gradient = update.gradients[name] * limit / update.grad_norm
            if weight.ndim >= 2:
                gradient += CLIPPED_SGD.weight_decay * weight
            velocities[name] = gradient + momentum * velocities.get(name, torch.zeros_like(weight))
            weights[name] = weight - CLIPPED_SGD.lr * velocities[name]
        engine.load_weights(NamedWeight(name, weight) for name, weight in weights.items())
    return weights


def train_with_skips(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the exported weights and the outcome of each update, one update per batch."""
    engine, outcomes = rank.temporary_engine(setup), list[str]()
    for batch in batches:
        update_weights(engine, batch)
        assert engine.last_update is not None
        outcomes.append(engine.last_update.outcome)
    return collect_weights(engine), outcomes


@pytest.mark.if_claimed(Capability.ANY_OPTIMIZER)
def test_nonfinite_gradient_skips_the_update_of_sgd(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that an update with an infinite gradient changes neither weights nor momentum."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=CLIPPED_SGD, compute="fp32")
    if is_rejected_by_the_layout(engine_under_test, setup):
        return
    good = oracle.get_batch()
    # A single trained token is infinite, so only one data-parallel rank sees it locally.
    advantages = good.columns["advantages"].clone()
    advantages[int(good.loss_mask.nonzero()[0])] = math.inf
    bad = good.with_columns({"advantages": advantages})
    with_skip, without = (
        engine_under_test.run(train_with_skips, setup=setup, batches=batches)
        for batches in ([good, bad, good], [good, good])
    )
    for (weights, outcomes), (expected, _) in zip(with_skip, without, strict=True):
        assert outcomes == ["stepped", "nonfinite", "stepped"]
        assert_all_equal(weights, expected, quantity="weights after a skipped update")


@pytest.mark.if_claimed(Capability.ANY_OPTIMIZER)
def test_momentum_of_sgd_is_resumed(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """Check that a checkpoint contains the state of another optimizer than AdamW."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=DECAYING_SGD, compute="fp32")
    if is_rejected_by_the_layout(engine_under_test, setup):
        return
    for resumed, unbroken in engine_under_test.run(
        resume_with_momentum, setup=setup, batch=oracle.get_batch(), folder=tmp_path
    ):
        assert_all_equal(resumed, unbroken, quantity="weights after the second update")


def resume_with_momentum(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch, folder: Path, moves: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after two updates, with a new engine for the second, and without.

    If `moves` is True, the first engine is offloaded in between, and loaded again.
    """
    unbroken, resumed = rank.temporary_engine(setup), rank.temporary_engine(setup)
    update_weights(unbroken, batch)
    if moves:
        unbroken.to("cpu")
        unbroken.to("device")
    unbroken.save_checkpoint(str(folder), global_step=1)
    resumed.load_checkpoint(str(folder))
    for engine in (resumed, unbroken):
        update_weights(engine, batch)
    return collect_weights(resumed), collect_weights(unbroken)


@pytest.mark.if_claimed(Capability.ANY_OPTIMIZER)
def test_number_in_the_state_of_an_optimizer_is_kept(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """Check that moving and resuming keep a state that is a Python number, not a tensor."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=COUNTING_SGD, compute="fp32")
    if is_rejected_by_the_layout(engine_under_test, setup):
        return
    batch = oracle.get_batch()
    expected = engine_under_test.run(train_with_skips, setup=setup, batches=[batch, batch])
    moved = engine_under_test.run(
        resume_with_momentum, setup=setup, batch=batch, folder=tmp_path, moves=True
    )
    for (resumed, unbroken), (weights, _) in zip(moved, expected, strict=True):
        assert_all_equal(unbroken, weights, quantity="weights after a move")
        assert_all_equal(resumed, weights, quantity="weights after a resume")


@pytest.mark.if_claimed(Capability.ANY_OPTIMIZER)
def test_rejected_checkpoint_changes_no_weight_of_sgd(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """Check that a rejected checkpoint of another model changes no weight.

    torch's optimizers create their state in the first step, so an engine may step before it loads.
    """
    setup, other = (
        oracle.make_setup(model, optimizer=DECAYING_SGD, compute="fp32")
        for model in (QWEN2_GROUPED, OTHER_SHAPES[0])
    )
    if is_rejected_by_the_layout(engine_under_test, setup):
        return
    engine_under_test.run(
        train_and_export, setup=other, batch=oracle.get_batch(), saves_to=tmp_path
    )
    for before, after in engine_under_test.run(load_other_model, setup=setup, folder=tmp_path):
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


def load_other_model(
    rank: Rank, *, setup: EngineSetup, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before and after a checkpoint was rejected."""
    engine = rank.temporary_engine(setup)
    before = collect_weights(engine)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(str(folder))
    return before, collect_weights(engine)


@pytest.mark.if_claimed(Capability.OTHER_DTYPES)
def test_parameters_in_bf16_are_rounded_to_bf16(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that no master weight has more digits than bf16 with precision.parameters bf16."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW, compute="bf16", parameters="bf16")
    if is_rejected_by_the_layout(engine_under_test, setup):
        return
    update = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[oracle.get_batch()]
    )[0][0]
    exact = [name for name, master in update.masters.items() if not is_rounded_to_bf16(master)]
    assert not exact, f"these master weights are not bf16: {', '.join(exact[:5])}"


@pytest.mark.if_claimed(Capability.OTHER_DTYPES)
def test_buffers_in_bf16_change_the_rotary_angles(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that log-probs of long sequences change with precision.buffers bf16."""
    setup = oracle.make_setup(QWEN2_GROUPED, compute="fp32", buffers="bf16")
    if is_rejected_by_the_layout(engine_under_test, setup):
        return
    batch = oracle.get_batch_of((90, 40), prompt_length=2)
    outputs = engine_under_test.run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    exact = oracle.get_outputs(oracle.make_setup(QWEN2_GROUPED), batch, HeadOutput.LOGPROB)
    distance = float((outputs.columns[HeadOutput.LOGPROB] - exact).abs().max())
    assert distance > 1e-3, f"log-probs are only {distance} from those with float32 buffers"


@pytest.mark.if_claimed(Capability.OTHER_DTYPES, Capability.DATA_PARALLEL)
def test_reduction_in_bf16_rounds_gradients(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that gradients with precision.reduce bf16 are close to the exact ones, but not equal.

    One rank has nothing to reduce, so this takes effect on several data-parallel ranks only.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED, compute="fp32"), oracle.get_batch()
    rounded = replace(setup, reduce="bf16")
    if is_rejected_by_the_layout(engine_under_test, rounded):
        return
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    update = engine_under_test.run(
        measure_update, setup=rounded, objective=ClippedPpoProbe(), batch=batch
    )[0]
    for name, gradient in update.gradients.items():
        assert_close(
            gradient,
            expected.gradients[name],
            BF16,
            quantity=f"gradient of {name}",
            min_scale=float(expected.grad_norm) * 0.03,
        )
    sizes = engine_under_test.run(get_data_parallel_size, setup=setup)
    if sizes[0] > 1:
        distance = max(
            float((update.gradients[n] - expected.gradients[n]).abs().max())
            for n in update.gradients
        )
        assert distance > 1e-4 * expected.grad_norm, "gradients were not reduced in bf16"


def get_data_parallel_size(rank: Rank, *, setup: EngineSetup) -> int:
    """Return the number of data-parallel ranks."""
    return rank.cached_engine(setup).topology.dp.size


def test_master_weights_stay_float32_under_bf16_compute(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Compare an update under bf16 compute with AdamW on float32 master weights.

    The expected weights are computed by hand from the weights before the update and the moments
    after it, w (1 - lr decay) - lr m / (1 - b1) / (sqrt(v / (1 - b2)) + eps).
    """
    optimizer = replace(ADAMW, decays_vectors=True)
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=optimizer, compute="bf16")
    batch = oracle.get_batch()
    before = oracle.get_update(oracle.make_setup(QWEN2_GROUPED), ClippedPpoProbe(), batch).masters
    update = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[batch]
    )[0][0]
    (b1, b2), lr = optimizer.betas, optimizer.lr
    for name, state in update.state.items():
        root = (state.second_moment.double() / (1 - b2)).sqrt()
        expected = before[name].double() * (1 - lr * optimizer.weight_decay) - lr * (
            state.first_moment.double() / (1 - b1) / (root + optimizer.eps)
        )
        # Rounding a weight to bf16 would move it by up to 4e-3.
        tolerance = replace(LOSS, relative_bf16=None)
        assert_close(state.master, expected, tolerance, quantity=f"master weight {name}")


def test_gradients_are_not_rounded_under_bf16_compute(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that gradients of three micro-batches are summed in float32 under bf16 compute.

    The gradient of one micro-batch may be bf16, as its matmuls are; the sum of three is not.
    """
    setup = oracle.make_setup(QWEN2_GROUPED, compute="bf16")
    update = engine_under_test.run(
        measure_update,
        setup=setup,
        objective=ClippedPpoProbe(),
        batch=oracle.get_batch(num_sequences=12),
        split=THREE_MICRO_BATCHES,
    )[0]
    rounded = [
        name
        for name, gradient in update.gradients.items()
        if gradient.count_nonzero() >= MIN_ENTRIES and is_rounded_to_bf16(gradient)
    ]
    assert not rounded, f"these gradients were rounded to bf16: {', '.join(rounded[:5])}"


def test_forward_only_calls_draw_no_random_numbers(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that passes in `eval_mode` leave the random state of torch and Python unchanged.

    Otherwise the training that follows depends on how often the engine was evaluated.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    changed = engine_under_test.run(find_changed_random_states, setup=setup, batch=batch)
    assert not any(changed), f"forward-only calls changed the random state of {changed}"


def find_changed_random_states(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> list[str]:
    """Return the generators that a call with outputs or one with a loss changed."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    # One update first, because the first pass may compile or initialize something.
    run_update(engine, [local_batch])
    before = get_random_states()
    with engine.eval_mode():
        engine.forward_backward_batch(
            local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB, HeadOutput.ENTROPY]
        )
        engine.forward_backward_batch(local_batch, forward_only=True)
    after = get_random_states()
    return [name for name in before if before[name] != after[name]]


def get_random_states() -> dict[str, object]:
    """Return the states of the generators that torch and Python use by default."""
    states: dict[str, object] = {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states
