"""Probe objectives for the invariance tests: one per kind that an engine must support.

They cover per-token and per-sequence terms, pairs, log-probs at given ids, statistics over the full
mini-batch, and values. The probes that are not in `PROBES` serve single tests.

B sequences, T tokens, K given ids.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, compute_weighted_mean
from temper_engine_api.objective import (
    LOGPROB_AT_IDS,
    Aggregation,
    AggregationMode,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_engine_api.reduction import sum_per_sequence

_PER_SEQUENCE = Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN)
_PER_GROUP = Aggregation(mode=AggregationMode.GROUP_MEAN)


@register_objective("probe_clipped_ppo")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedPpoProbe(Objective):
    """Clipped PPO with per-token weights, and optionally an entropy bonus and a z-loss.

    loss_t = w_t (-min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) - c H_t + z log(Z_t)^2), with
    r_t = exp(logprobs_t - old_logprobs_t) and Z_t the sum of the exponentials of the logits.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric clip: Yu et al. 2025,
    arXiv:2503.14476; z-loss: Chowdhery et al. 2022, arXiv:2204.02311, section 5.
    """

    clip_low: float = 0.2
    """Largest decrease of the ratio below 1 that still has a gradient."""
    clip_high: float = 0.3
    """Largest increase of the ratio above 1 that still has a gradient."""
    entropy_coefficient: float = 0.0
    """c; above 0 the entropy is requested, with gradient."""
    z_loss_coefficient: float = 0.0
    """z; above 0 the logsumexp is requested, with gradient."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    @override
    def required_outputs(self) -> frozenset[HeadOutput]:
        entropy = {HeadOutput.ENTROPY} if self.entropy_coefficient else set()
        logsumexp = {HeadOutput.LOGSUMEXP} if self.z_loss_coefficient else set()
        return frozenset({HeadOutput.LOGPROB} | entropy | logsumexp)

    @property
    @override
    def columns(self) -> frozenset[str]:
        return frozenset({"old_logprobs", "advantages", "weights"})

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        ratio = torch.exp(head_outputs[HeadOutput.LOGPROB] - batch.columns["old_logprobs"])
        advantages = batch.columns["advantages"]
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * head_outputs[HeadOutput.ENTROPY]
        if self.z_loss_coefficient:
            loss = loss + self.z_loss_coefficient * head_outputs[HeadOutput.LOGSUMEXP].square()
        metrics = {"ratio": compute_weighted_mean(ratio, batch.loss_mask.float())}
        return LossTerms(loss=loss, weight=batch.columns["weights"], metrics=metrics)


@register_objective("probe_gspo")
@dataclass(frozen=True, slots=True, kw_only=True)
class GspoProbe(Objective):
    """GSPO: a sequence's ratio is the geometric mean of its tokens' ratios.

    Source: Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7.
    """

    clip: float = 0.1
    """Largest distance of the ratio from 1 that still has a gradient."""
    aggregation: Aggregation = field(default_factory=lambda: _PER_SEQUENCE)

    @property
    @override
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    @property
    @override
    def columns(self) -> frozenset[str]:
        return frozenset({"old_logprobs", "sequence_advantages"})

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        log_ratio = torch.where(
            batch.loss_mask, head_outputs[HeadOutput.LOGPROB] - batch.columns["old_logprobs"], 0.0
        )
        # At least 1, because 0 / 0 of an untrained sequence would make the gradient NaN.
        trained = sum_per_sequence(batch.loss_mask.float(), batch).clamp(min=1.0)
        ratio = torch.exp(sum_per_sequence(log_ratio, batch) / trained)
        advantages = batch.sequence_columns["sequence_advantages"]
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        return LossTerms(
            loss=-torch.minimum(ratio * advantages, clipped * advantages), level="sequence"
        )


@register_objective("probe_dpo")
@dataclass(frozen=True, slots=True, kw_only=True)
class DpoProbe(Objective):
    """DPO on indivisible pairs; each sequence in a pair gets half of the pair's loss.

    loss = -log sigmoid(beta (sum log(pi / ref) of the chosen - sum log(pi / ref) of the rejected)).

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7.
    """

    beta: float = 0.5
    """Weight of the KL penalty towards the reference policy."""
    aggregation: Aggregation = field(default_factory=lambda: _PER_GROUP)

    @property
    @override
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    @property
    @override
    def columns(self) -> frozenset[str]:
        return frozenset({"ref_logprobs", "is_chosen"})

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        log_ratio = torch.where(
            batch.loss_mask, head_outputs[HeadOutput.LOGPROB] - batch.columns["ref_logprobs"], 0.0
        )
        sign = torch.where(batch.sequence_columns["is_chosen"], 1.0, -1.0)
        pairs, pair_of = torch.unique(batch.pack_group_ids, return_inverse=True)
        margin = log_ratio.new_zeros(pairs.shape[0]).index_add(
            0, pair_of, sign * sum_per_sequence(log_ratio, batch)
        )
        loss = -torch.nn.functional.logsigmoid(self.beta * margin)
        return LossTerms(loss=0.5 * loss[pair_of], level="sequence")


@register_objective("probe_distillation")
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationProbe(Objective):
    """Distillation: forward KL to a teacher, over given ids only.

    loss_t = sum_k q_k (log q_k - log p(id_k)), where q is the teacher's distribution.

    Source: Hinton et al. 2015, arXiv:1503.02531; on K ids as in Gu et al. 2023, arXiv:2306.08543,
    section 2.
    """

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    @override
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB_AT})

    @property
    @override
    def columns(self) -> frozenset[str]:
        return frozenset({LOGPROB_AT_IDS, "teacher_logprobs"})

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        teacher = batch.columns["teacher_logprobs"]
        return LossTerms(
            loss=(teacher.exp() * (teacher - head_outputs[HeadOutput.LOGPROB_AT])).sum(-1)
        )


@register_objective("probe_clip_cov")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovProbe(Objective):
    """Clip-Cov: random tokens with a large covariance of log-prob and advantage get no gradient.

    The covariance is taken over all trained tokens of the mini-batch, so a micro-batch alone could
    not compute it.

    Source: Cui et al. 2025, arXiv:2505.22617, equations 8 to 10.
    """

    lower: float = 0.0
    """Only tokens with a larger covariance may be dropped."""
    fraction: float = 0.3
    """Largest fraction of the trained tokens to drop."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    @override
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    @property
    @override
    def columns(self) -> frozenset[str]:
        return frozenset({"old_logprobs", "advantages", "is_kept"})

    @override
    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        # In float64, so that float32 rounding does not decide which tokens exceed the limit.
        logprobs, advantages = (
            batch.columns["old_logprobs"].double(),
            batch.columns["advantages"].double(),
        )
        mask = batch.loss_mask
        if not bool(mask.any()):
            return {"is_kept": torch.ones(batch.num_tokens)}
        covariance = (logprobs - logprobs[mask].mean()) * (advantages - advantages[mask].mean())
        noise = torch.where(
            mask & (covariance > self.lower), _hashed_uniform_noise(batch, seed=seed), math.inf
        )
        num_chosen = min(int(self.fraction * int(mask.sum())), int(noise.isfinite().sum()))
        is_kept = torch.ones(batch.num_tokens)
        is_kept[noise.argsort(stable=True)[:num_chosen]] = 0.0
        return {"is_kept": is_kept}

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        ratio = torch.exp(head_outputs[HeadOutput.LOGPROB] - batch.columns["old_logprobs"])
        return LossTerms(loss=-ratio * batch.columns["advantages"], weight=batch.columns["is_kept"])


@register_objective("probe_clipped_value")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedValueProbe(Objective):
    """Clipped value loss: 0.5 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2).

    Source: the reference implementation of Schulman et al. 2017, arXiv:1707.06347; Engstrom et al.
    2020, arXiv:2005.12729, section 3.
    """

    clip: float = 0.2
    """Half width eps of the clip range around the old value."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    @override
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.VALUE})

    @property
    @override
    def columns(self) -> frozenset[str]:
        return frozenset({"old_values", "returns"})

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        values, old_values = head_outputs[HeadOutput.VALUE], batch.columns["old_values"]
        clipped = torch.clamp(values, old_values - self.clip, old_values + self.clip)
        returns = batch.columns["returns"]
        return LossTerms(
            loss=0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
        )


PROBES: tuple[Objective, ...] = (
    ClippedPpoProbe(),
    GspoProbe(),
    DpoProbe(),
    DistillationProbe(),
    ClipCovProbe(),
    ClippedValueProbe(),
)


@register_objective("probe_score")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreProbe(Objective):
    """Train scores on indivisible pairs: loss = -log sigmoid(chosen - rejected).

    Source: Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1.
    """

    aggregation: Aggregation = field(default_factory=lambda: _PER_GROUP)

    @property
    @override
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.SCORE})

    @property
    @override
    def columns(self) -> frozenset[str]:
        return frozenset({"is_chosen"})

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        sign = torch.where(batch.sequence_columns["is_chosen"], 1.0, -1.0)
        pairs, pair_of = torch.unique(batch.pack_group_ids, return_inverse=True)
        scores = head_outputs[HeadOutput.SCORE]
        margin = scores.new_zeros(pairs.shape[0]).index_add(0, pair_of, sign * scores)
        loss = -torch.nn.functional.logsigmoid(margin)
        return LossTerms(loss=0.5 * loss[pair_of], level="sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobProbe(Objective):
    """Base class of probes that need log-probs only and use the default aggregation."""

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    @override
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})


@register_objective("probe_zero")
@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroProbe(LogprobProbe):
    """A loss of 0, so that only losses which the engine adds have a gradient."""

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        return LossTerms(loss=0.0 * head_outputs[HeadOutput.LOGPROB])


@register_objective("probe_constant")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantProbe(Objective):
    """A loss of 0 that depends on no output, as of a micro-batch whose tokens are all dropped."""

    required_outputs: frozenset[HeadOutput]
    """Outputs that the head computes although the loss ignores them."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        return LossTerms(loss=torch.zeros(batch.num_tokens, device=batch.tokens.device))


@register_objective("probe_determinism")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismProbe(LogprobProbe):
    """Return as a metric whether torch allows only deterministic kernels; SftProbe's loss."""

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        metric = Metric(value=float(is_deterministic), reduction="min")
        return LossTerms(
            loss=-head_outputs[HeadOutput.LOGPROB], metrics={DETERMINISM_METRIC: metric}
        )


DETERMINISM_METRIC = "is_deterministic"
"""Metric name of DeterminismProbe: 1 if it holds in every micro-batch."""


def _hashed_uniform_noise(batch: SequenceBatch, *, seed: int) -> Tensor:
    """Return [T] float64 in [0, 1) that depends on (seed, sample id, position) only.

    The order of samples does not matter. A multiply-and-shift hash in wrapping 64-bit integers.
    """
    starts = batch.sequence_starts.long()[:-1]
    position = torch.arange(batch.num_tokens) - starts[batch.sequence_index]
    key = batch.sample_ids[batch.sequence_index] * 1_000_003 + position * 8_191 + seed
    for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        key = key * factor
        key = key ^ (key >> 29)
    # 52 bits, which float64 holds exactly.
    return (key & ((1 << 52) - 1)).double() / (1 << 52)


MICRO_BATCH_METRIC = "saw "
"""Prefix of the metrics that MicroBatchRecorder returns."""


@register_objective("probe_sft")
@dataclass(frozen=True, slots=True, kw_only=True)
class SftProbe(LogprobProbe):
    """Supervised fine-tuning: loss_t = -logprobs_t."""

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        return LossTerms(loss=-head_outputs[HeadOutput.LOGPROB])


@register_objective("probe_micro_batches")
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRecorder(LogprobProbe):
    """Return a metric named after each micro-batch's samples; the loss is SftProbe's."""

    @override
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        count = Metric(value=1.0, reduction="sum")
        return LossTerms(
            loss=-head_outputs[HeadOutput.LOGPROB],
            metrics={name_micro_batch_metric(batch.sample_ids): count},
        )


def name_micro_batch_metric(sample_ids: Tensor) -> str:
    """Return the metric name of a micro-batch with these samples, in this order."""
    return MICRO_BATCH_METRIC + ",".join(str(sample) for sample in sample_ids.tolist())
