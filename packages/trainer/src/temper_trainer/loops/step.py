"""One RL step on one page: sample, score, annotate, estimate, update, publish."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import Objective, Query
from temper_engine_api.outputs import gather_outputs
from temper_trainer.algorithms.advantages import estimate_advantages
from temper_trainer.algorithms.kl import KlController, estimate_kl, sequence_kl
from temper_trainer.algorithms.mismatch import mismatch_metrics
from temper_trainer.algorithms.objectives import needs_old_logprobs
from temper_trainer.algorithms.value_loss import ValueObjective, explained_variance
from temper_trainer.batching.idle import without_idle
from temper_trainer.batching.packing import pack
from temper_trainer.batching.report import describe, plan_metrics
from temper_trainer.batching.samples import to_samples
from temper_trainer.batching.step_plan import StepPlan, layout_of, plan_forward, plan_step
from temper_trainer.config.run import TrainerConfig
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.runtime.worker import UpdateResult
from temper_trainer.types import FinishReason, Prompt, Rollout, SamplingRequest


@dataclass(slots=True)
class StepClock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the body's wall time to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"time/{name}_s"] = self.seconds.get(f"time/{name}_s", 0.0) + time.perf_counter() - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one RL step leaves."""

    metrics: Mapping[str, float]
    """Numbers for the log."""
    rollouts: Sequence[Rollout]
    """In the order of their sample ids."""
    kl: KlController
    """Weight of the KL penalty of the next step."""


def rl_step(rooms: Rooms, *, step: int, objectives: Mapping[str, Objective], kl: KlController) -> StepResult:
    """One RL step over the rooms.

    Args:
        rooms: open ones.
        step: its number, from 1.
        objectives: of the trained roles, by role.
        kl: weight of the KL penalty on rewards.
    """
    clock, config = StepClock(), rooms.config
    begin = time.perf_counter()
    with clock.phase("rollout"):
        prompts = rooms.prompts.take(config.batching.prompts_per_step)
        rollouts, metrics = sample_rollouts(rooms, prompts, step=step, clock=clock)
    samples = to_samples(rollouts, temperature=config.sampling.temperature)
    layouts = {name: layout_of(role.topology) for name, role in rooms.roles.items()}
    plan = plan_step(samples, config.batching, topologies=layouts, seed=derive_seed(config.run.seed, "mini-batches", step))
    if step == 1:
        rooms.log.say(describe(plan, samples))
    with clock.phase("annotate"):
        samples = annotate(rooms, samples, plan)
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    samples, advantage_metrics, kl = add_advantages(rooms, samples, rewards=rewards, kl=kl)
    if can_skip_idle(config):
        plan = without_idle(plan, samples, role="actor", layout=layouts["actor"], max_tokens=config.batching.max_tokens)
    with clock.phase("update"):
        merged = update_roles(rooms, samples, plan, objectives=objectives, step=step)
    metrics |= plan_metrics(plan, samples, role="actor") | advantage_metrics | merged
    with clock.phase("weight_sync"):
        metrics |= rooms.publisher.publish(rooms.canary)
    clock.seconds["time/step_s"] = time.perf_counter() - begin
    metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / max(clock.seconds["time/rollout_s"], 1e-9)
    metrics["data/epoch"] = float(rooms.prompts.cursor.epoch)
    return StepResult(metrics={**metrics, **clock.seconds}, rollouts=rollouts, kl=kl)


def sample_rollouts(rooms: Rooms, prompts: Sequence[Prompt], *, step: int, clock: StepClock) -> tuple[list[Rollout], dict[str, float]]:
    """``group_size`` completions of each prompt, scored; those without a reward are counted and left out."""
    config, group_size = rooms.config, rooms.config.algorithm.group_size
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    requests = [
        SamplingRequest(
            request_id=i,
            prompt_tokens=prompt.tokens,
            sampling=config.sampling,
            seed=derive_seed(config.run.seed, "sampling", step, i),
        )
        for i, prompt in enumerate(asked)
    ]
    completions = rooms.sampler.sample(requests)
    texts = [rooms.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
    with clock.phase("reward"):
        scores = rooms.scorer.score(list(zip(asked, texts, strict=True)))
    rollouts = [
        Rollout(prompt=asked[i], completion=completions[i], text=texts[i], reward=score.reward, group_id=i // group_size, sample_id=i)
        for i, score in enumerate(scores)
        if score.reward is not None
    ]
    if not rollouts:
        raise BatchError(f"not one of {len(asked)} completions of step {step} has a reward: look at the reward function.")
    lengths = [len(c.tokens) for c in completions]
    rewards = torch.tensor([r.reward for r in rollouts])
    stale = [c for c in completions if c.weight_version != rooms.publisher.version]
    if stale:
        raise BatchError(f"{len(stale)} completions carry weights {stale[0].weight_version}, but {rooms.publisher.version} are published.")
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/failed": float(len(asked) - len(rollouts)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/cut_share": sum(c.finish_reason == FinishReason.MAX_TOKENS for c in completions) / len(completions),
    }
    return rollouts, metrics | rooms.scorer.metrics()


def annotate(rooms: Rooms, samples: SequenceBatch, plan: StepPlan) -> SequenceBatch:
    """Add old_logprobs, ref_logprobs and values, each by the micro-batches that the update will use."""
    algorithm, columns = rooms.config.algorithm, {}
    if needs_old_logprobs(algorithm, rooms.config.batching):
        columns["old_logprobs"] = _forward(rooms, samples, plan, role="actor", query=Query.LOGPROB)
    if "ref" in rooms.roles:
        columns["ref_logprobs"] = _forward(rooms, samples, plan, role="ref", query=Query.LOGPROB)
    if algorithm.kl_reference == "disabled_adapter":
        columns["ref_logprobs"] = _forward(rooms, samples, plan, role="actor", query=Query.LOGPROB, without_adapter=True)
    if algorithm.advantage == "gae":
        columns["values"] = _forward(rooms, samples, plan, role="critic", query=Query.VALUE)
    return samples.with_columns(columns)


def can_skip_idle(config: TrainerConfig) -> bool:
    """Whether samples without an advantage add nothing to the actor's gradient, and no earlier pass fixed its micro-batches."""
    algorithm = config.algorithm
    has_other_terms = algorithm.entropy_coef != 0 or algorithm.kl_loss_coef > 0
    return not has_other_terms and not needs_old_logprobs(algorithm, config.batching)


def _forward(rooms: Rooms, samples: SequenceBatch, plan: StepPlan, *, role: str, query: Query, without_adapter: bool = False) -> Tensor:
    """[T] answers of one role, or of the base of its adapter, over the mini-batches of the first pass."""
    group, parts = rooms.roles[role], []
    for mini_batch in plan_forward(plan):
        ids = samples.sample_ids[torch.tensor(mini_batch.indices)]
        share = pack(samples, mini_batch, role)
        parts.append(group.forward(share, outputs=[query], sample_ids=ids, without_adapter=without_adapter))
    return gather_outputs(parts, sample_ids=samples.sample_ids).columns[query]


def add_advantages(
    rooms: Rooms, samples: SequenceBatch, *, rewards: Tensor, kl: KlController
) -> tuple[SequenceBatch, dict[str, float], KlController]:
    """Advantages, and for gae returns, as columns; their metrics; the KL controller of the next step."""
    algorithm, columns = rooms.config.algorithm, samples.columns
    metrics: dict[str, float] = {}
    if "old_logprobs" in columns:
        found = mismatch_metrics(columns["old_logprobs"], rollout_logprobs=columns["rollout_logprobs"], loss_mask=samples.loss_mask)
        metrics |= {name: metric.result for name, metric in found.items()}
    token_kl = None
    if algorithm.kl_reward_coef > 0:
        token_kl = estimate_kl(columns["old_logprobs"], ref_logprobs=columns["ref_logprobs"], estimator=algorithm.kl_estimator)
    estimated = estimate_advantages(algorithm, samples=samples, rewards=rewards, values=columns.get("values"), kl=token_kl, kl_coef=kl.coef)
    if token_kl is not None:
        per_completion = sequence_kl(token_kl, samples=samples)
        metrics |= {"ref/kl": per_completion, "ref/kl_coef": kl.coef}
        kl = kl.updated(kl=per_completion, num_samples=samples.num_sequences)
    added = {"advantages": estimated.advantages}
    if estimated.returns is not None:
        added["returns"] = estimated.returns
    return samples.with_columns(added), metrics | estimated.metrics, kl


def update_roles(
    rooms: Rooms, samples: SequenceBatch, plan: StepPlan, *, objectives: Mapping[str, Objective], step: int
) -> dict[str, float]:
    """Every mini-batch of every pass, for every trained role."""
    found: dict[str, float] = {}
    for role, objective in objectives.items():
        metrics: list[Mapping[str, Metric]] = []
        for i, mini_batch in enumerate(plan.mini_batches):
            is_last = i == len(plan.mini_batches) - 1
            result = rooms.roles[role].update(pack(samples, mini_batch, role, objective=objective), is_last_of_step=is_last)
            if i == 0 and "policy/ratio_error_max" in result.metrics:
                found["policy/first_ratio_error_max"] = result.metrics["policy/ratio_error_max"].result
            if result.report.outcome == "nonfinite":
                rooms.log.say(f"step {step}: {role} skipped a non-finite update; samples {result.report.sample_ids[:8]}")
            metrics.append(update_metrics(result))
        merged = merge_metrics(metrics)
        found |= {name if "/" in name else f"{role}/{name}": metric.result for name, metric in merged.items()}
        if isinstance(objective, ValueObjective):
            found["value/explained_variance"] = explained_variance(merged)
    return found


def update_metrics(result: UpdateResult) -> dict[str, Metric]:
    """An update's metrics with loss, norm, rate and outcome in a form that merges over updates."""
    is_skipped = result.report.outcome == "nonfinite"
    return {
        **result.metrics,
        "loss": Metric(value=result.metrics["loss"].result),
        "grad_norm": Metric(value=0.0 if is_skipped else result.report.grad_norm, weight=float(not is_skipped)),
        "skipped_updates": Metric(value=float(result.report.outcome != "stepped"), reduction="sum"),
        "lr": Metric(value=result.lr),
    }
