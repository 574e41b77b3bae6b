"""Test the oracle against formulas that it does not use itself."""

import pytest
import torch
from torch.nn import functional

from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import Rank
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe, SftProbe
from temper_engine_api.conformance.inputs.tiny_models import (
    BUFFERS,
    QWEN2_GROUPED,
    REWARD,
    VALUE,
)
from temper_engine_api.conformance.oracle.oracle_engine import STATE_FILE
from temper_engine_api.errors import CheckpointError
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput
from temper_engine_api.specs import OptimizerSpec


def padded_logits(engine, batch):
    """Return logits [B, L, V] of the right-padded batch, its tokens and its mask."""
    longest = int(batch.lengths.max())
    tokens = torch.zeros(batch.num_sequences, longest, dtype=torch.int64)
    mask = torch.zeros(batch.num_sequences, longest, dtype=torch.int64)
    for b, (first, last) in enumerate(
        zip(batch.sequence_starts, batch.sequence_starts[1:], strict=False)
    ):
        tokens[b, : last - first] = batch.tokens[first:last]
        mask[b, : last - first] = 1
    return engine.model(input_ids=tokens, attention_mask=mask).logits, tokens, mask


def test_logprobs_are_the_negative_cross_entropy_of_a_padded_batch(shared):
    oracle, batch = shared.oracle, shared.oracle.get_batch()
    setup = oracle.make_setup(QWEN2_GROUPED)
    engine = oracle.rank.cached_engine(setup)
    with torch.no_grad():
        logits, tokens, mask = padded_logits(engine, batch)
    tempered = logits / batch.temperature[:, None, None]
    costs = functional.cross_entropy(
        tempered[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    rows = torch.cat(
        [torch.zeros(batch.num_sequences, 1), -costs.view(batch.num_sequences, -1)], dim=1
    )
    expected = rows[mask.bool()]
    actual = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    assert torch.allclose(actual, expected, atol=3e-6)
    assert not torch.allclose(actual, expected.roll(1), atol=1e-1)


def test_entropy_equals_that_of_torch_categorical(shared):
    oracle, batch = shared.oracle, shared.oracle.get_batch()
    setup = oracle.make_setup(QWEN2_GROUPED)
    with torch.no_grad():
        logits, _, mask = padded_logits(oracle.rank.cached_engine(setup), batch)
    entropy = torch.distributions.Categorical(
        logits=logits / batch.temperature[:, None, None]
    ).entropy()
    expected = torch.cat([torch.zeros(batch.num_sequences, 1), entropy[:, :-1]], dim=1)[mask.bool()]
    assert torch.allclose(oracle.get_outputs(setup, batch, HeadOutput.ENTROPY), expected, atol=3e-6)


def test_gradient_equals_that_of_the_padded_mean_cross_entropy(shared):
    oracle, batch = shared.oracle, shared.oracle.get_batch()
    setup = oracle.make_setup(QWEN2_GROUPED)
    measured = oracle.get_update(setup, SftProbe(), batch).gradients
    engine = oracle.rank.cached_engine(setup)
    logits, tokens, mask = padded_logits(engine, batch)
    trained = torch.zeros_like(mask, dtype=torch.bool)
    trained[mask.bool()] = batch.loss_mask
    tempered = (logits / batch.temperature[:, None, None])[:, :-1][trained[:, 1:]]
    functional.cross_entropy(tempered, tokens[:, 1:][trained[:, 1:]]).backward()
    for name, parameter in engine.parameters().items():
        assert torch.allclose(measured[name], parameter.grad, atol=2e-6), name
    engine.optimizer_zero_grad()


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_checkpoint_with_other_buffers_changes_nothing(shared, tmp_path, change):
    oracle = shared.oracle
    engine = oracle.rank.temporary_engine(oracle.make_setup(BUFFERS))
    engine._write_state(str(tmp_path))
    state = torch.load(tmp_path / STATE_FILE)
    if change == "missing":
        state["buffers"].popitem()
    else:
        state["buffers"]["other"] = torch.zeros(1)
    torch.save(state, tmp_path / STATE_FILE)
    with torch.no_grad():
        for parameter in engine.parameters().values():
            parameter.add_(1.0)
    before = {name: parameter.clone() for name, parameter in engine.parameters().items()}
    with pytest.raises(CheckpointError, match=change):
        engine._read_state(str(tmp_path))
    assert all(parameter.equal(before[name]) for name, parameter in engine.parameters().items())


def test_updates_equal_those_of_torch_adamw(shared):
    oracle = shared.oracle
    spec = OptimizerSpec(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, clip_grad_norm=0.5)
    engine = Rank(
        type(oracle.rank.cached_engine(oracle.make_setup(QWEN2_GROUPED)))
    ).temporary_engine(oracle.make_setup(QWEN2_GROUPED, optimizer=spec))
    engine.set_loss_fn(ClippedPpoProbe())
    copies = {name: p.detach().clone().requires_grad_() for name, p in engine.parameters().items()}
    torch_adamw = torch.optim.AdamW(
        [
            {"params": [c for c in copies.values() if c.ndim >= 2], "weight_decay": 0.1},
            {"params": [c for c in copies.values() if c.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.8, 0.95),
        eps=1e-3,
    )
    for seed in range(3):
        batch = oracle.get_batch(seed=seed)
        run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])
        for name, copy in copies.items():
            copy.grad = engine.gradients()[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), 0.5)
        torch_adamw.step()
        assert torch.isclose(norm, torch.tensor(engine.last_update.grad_norm), rtol=1e-5)
        for name, copy in copies.items():
            assert torch.allclose(engine.parameters()[name], copy, atol=1e-6), name


def test_values_are_the_token_classifier_outputs_one_token_earlier(shared):
    oracle, batch = shared.oracle, shared.oracle.get_batch()
    engine = oracle.rank.cached_engine(oracle.make_setup(VALUE))
    values = oracle.get_outputs(oracle.make_setup(VALUE), batch, HeadOutput.VALUE)
    first, last = batch.sequence_starts[:2].tolist()
    with torch.no_grad():
        scores = engine.model(input_ids=batch.tokens[None, first:last]).logits[0, :, 0]
    assert values[0] == 0
    assert torch.allclose(values[first + 1 : last], scores[:-1], atol=1e-6)


def test_scores_are_the_outputs_at_the_last_token(shared):
    oracle, batch = shared.oracle, shared.oracle.get_batch()
    engine = oracle.rank.cached_engine(oracle.make_setup(REWARD))
    scores = oracle.get_outputs(oracle.make_setup(REWARD), batch, HeadOutput.SCORE)
    first, last = batch.sequence_starts[2:4].tolist()
    with torch.no_grad():
        expected = engine.model(input_ids=batch.tokens[None, first:last]).logits[0, -1, 0]
    assert torch.isclose(scores[2], expected, atol=1e-6)


def test_batches_prescribe_the_experts_of_the_oracle_if_so_requested(shared):
    oracle = shared.oracle.with_experts(prescribes_experts=True)
    batch = oracle.get_batch(num_sequences=2)
    bare = shared.oracle.with_experts().get_batch(num_sequences=2)
    assert ROUTED_EXPERTS not in bare.columns
    chosen = oracle.get_outputs(oracle.make_setup(QWEN2_GROUPED), bare, HeadOutput.ROUTED_EXPERTS)
    assert batch.columns[ROUTED_EXPERTS].dtype == torch.int16
    assert batch.columns[ROUTED_EXPERTS].float().equal(chosen)
