"""Test the probe objectives on numbers worked out by hand."""

import math

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.conformance.inputs.probes import (
    ClipCovProbe,
    ClippedPpoProbe,
    ClippedValueProbe,
    DistillationProbe,
    DpoProbe,
    GspoProbe,
)
from temper_engine_api.objective import (
    LOGPROB_AT_IDS,
    HeadOutput,
    HeadOutputs,
    list_objectives,
)


def pair(columns=None, sequence_columns=None):
    """Return a batch of two sequences of two tokens, of which the second is trained."""
    mask = torch.tensor([False, True])
    parts = {
        name: list(torch.tensor(column).view(2, 2, *torch.tensor(column).shape[1:]))
        for name, column in (columns or {}).items()
    }
    return from_sequences(
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        loss_masks=[mask, mask],
        sample_ids=[10, 11],
        pack_group_ids=[0, 0],
        group_ids=[0, 0],
        columns=parts,
        sequence_columns={
            name: torch.tensor(column) for name, column in (sequence_columns or {}).items()
        },
    )


def head_outputs_with(head_output, column):
    return HeadOutputs(columns={head_output: torch.tensor(column)})


def test_clipped_ppo_probe_clips_on_both_sides():
    # Ratios 1.5 and 0.5 at the trained tokens. Advantage 2: min(1.5 * 2, 1.3 * 2) = 2.6.
    # Advantage -1: min(-0.5, -0.8) = -0.8.
    batch = pair(
        {
            "old_logprobs": [0.0] * 4,
            "advantages": [0.0, 2.0, 0.0, -1.0],
            "weights": [1.0, 1.0, 1.0, 3.0],
        },
    )
    terms = ClippedPpoProbe()(
        head_outputs_with(HeadOutput.LOGPROB, [0.0, math.log(1.5), 0.0, math.log(0.5)]), batch
    )
    assert terms.loss[batch.loss_mask].tolist() == pytest.approx([-2.6, 0.8])
    assert terms.weight[batch.loss_mask].tolist() == [1.0, 3.0]
    assert terms.metrics["ratio"].result == pytest.approx(1.0)


def test_clipped_ppo_probe_requests_entropy_only_with_a_bonus():
    batch = pair({"old_logprobs": [0.0] * 4, "advantages": [0.0] * 4, "weights": [1.0] * 4})
    head_outputs = HeadOutputs(
        columns={
            HeadOutput.LOGPROB: torch.zeros(4),
            HeadOutput.ENTROPY: torch.tensor([0.0, 2.0, 0.0, 4.0]),
        }
    )
    probe = ClippedPpoProbe(entropy_coefficient=0.5)
    assert probe.required_outputs == {HeadOutput.LOGPROB, HeadOutput.ENTROPY}
    assert probe(head_outputs, batch).loss[batch.loss_mask].tolist() == [-1.0, -2.0]


def test_clipped_ppo_probe_adds_the_squared_logsumexp_as_z_loss():
    batch = pair({"old_logprobs": [0.0] * 4, "advantages": [0.0] * 4, "weights": [1.0] * 4})
    head_outputs = HeadOutputs(
        columns={
            HeadOutput.LOGPROB: torch.zeros(4),
            HeadOutput.LOGSUMEXP: torch.tensor([0.0, 2.0, 0.0, 4.0]),
        }
    )
    probe = ClippedPpoProbe(z_loss_coefficient=0.5)
    assert probe.required_outputs == {HeadOutput.LOGPROB, HeadOutput.LOGSUMEXP}
    assert probe(head_outputs, batch).loss[batch.loss_mask].tolist() == [2.0, 8.0]


def test_gspo_probe_uses_the_geometric_mean():
    # Trained log-ratios 0.05 and 0.2: ratios e^0.05 = 1.0513 and e^0.2 = 1.2214; the second is
    # clipped to 1.1.
    batch = pair({"old_logprobs": [0.0] * 4}, {"sequence_advantages": [1.0, 1.0]})
    terms = GspoProbe()(head_outputs_with(HeadOutput.LOGPROB, [9.0, 0.05, 9.0, 0.2]), batch)
    assert terms.level == "sequence"
    assert terms.loss.tolist() == pytest.approx([-math.exp(0.05), -1.1])


def test_dpo_probe_halves_the_loss_of_a_pair():
    # Margin: 0.5 * ((-1 + 3) - (-2 + 2)) = 1; -log sigmoid(1) = 0.3133, half for each.
    batch = pair({"ref_logprobs": [0.0, -3.0, 0.0, -2.0]}, {"is_chosen": [True, False]})
    terms = DpoProbe(beta=0.5)(head_outputs_with(HeadOutput.LOGPROB, [0.0, -1.0, 0.0, -2.0]), batch)
    assert terms.loss.tolist() == pytest.approx([0.5 * math.log(1 + math.exp(-1))] * 2)


def test_distillation_probe_is_zero_if_the_student_agrees():
    teacher = [[math.log(0.5), math.log(0.25)]] * 4
    batch = pair({LOGPROB_AT_IDS: [[0, 1]] * 4, "teacher_logprobs": teacher})
    assert (
        DistillationProbe()(head_outputs_with(HeadOutput.LOGPROB_AT, teacher), batch).loss.tolist()
        == [0.0] * 4
    )
    # A student with log-probs 1 lower everywhere: (0.5 + 0.25) * 1.
    lower = [[a - 1.0, b - 1.0] for a, b in teacher]
    assert DistillationProbe()(
        head_outputs_with(HeadOutput.LOGPROB_AT, lower), batch
    ).loss.tolist() == pytest.approx([0.75] * 4)


def test_clipped_value_probe_takes_the_larger_loss():
    # V = 1, old 0, eps 0.2, R = 1: unclipped 0, clipped (0.2 - 1)^2 / 2 = 0.32.
    # V = 0.1, R = 1.1: both are 0.5.
    batch = pair({"old_values": [0.0] * 4, "returns": [0.0, 1.0, 0.0, 1.1]})
    terms = ClippedValueProbe()(head_outputs_with(HeadOutput.VALUE, [0.0, 1.0, 0.0, 0.1]), batch)
    assert terms.loss[batch.loss_mask].tolist() == pytest.approx([0.32, 0.5])


def test_clip_cov_probe_does_not_depend_on_sample_order(shared):
    batch = shared.oracle.get_batch()
    order = [6, 0, 3, 7, 1, 5, 2, 4]
    probe = ClipCovProbe()
    kept = probe.prepare(batch, seed=3)
    moved = probe.prepare(batch.select(order), seed=3)
    assert torch.equal(batch.with_columns(kept).select(order).columns["is_kept"], moved["is_kept"])
    dropped = int((kept["is_kept"] == 0).sum())
    assert 0 < dropped <= 0.3 * int(batch.loss_mask.sum())
    assert not torch.equal(probe.prepare(batch, seed=4)["is_kept"], kept["is_kept"])


def test_clip_cov_probe_drops_only_large_covariances(shared):
    batch = shared.oracle.get_batch()
    mask = batch.loss_mask
    logprobs, advantages = batch.columns["old_logprobs"], batch.columns["advantages"]
    covariance = (logprobs - logprobs[mask].mean()) * (advantages - advantages[mask].mean())
    is_dropped = ClipCovProbe().prepare(batch, seed=3)["is_kept"] == 0
    assert bool((covariance[is_dropped] > 0).all())
    assert bool(mask[is_dropped].all())


def test_the_probes_are_registered():
    names = {
        "probe_clipped_ppo",
        "probe_gspo",
        "probe_dpo",
        "probe_distillation",
        "probe_clip_cov",
        "probe_clipped_value",
    }
    assert names <= list_objectives().keys()
