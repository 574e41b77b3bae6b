"""One RL step on one page: sample, score, annotate, estimate, update, publish."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.outputs import gather_outputs
from temper_trainer.algorithms.advantages import estimate_advantages
from temper_trainer.algorithms.distillation_losses import compute_teacher_reward
from temper_trainer.algorithms.kl import estimate_kl, mean_sequence_kl
from temper_trainer.algorithms.objective_factory import needs_old_logprobs
from temper_trainer.algorithms.resampling import resample_by_reward
from temper_trainer.algorithms.rollout_correction import (
    SQUARES,
    compute_effective_sample_fraction,
    compute_mismatch_metrics,
    compute_rollout_correction,
)
from temper_trainer.algorithms.surrogate import CORRECTION_WEIGHTS
from temper_trainer.algorithms.token_advantages import discount_by_turn
from temper_trainer.algorithms.value_loss import ValueObjective, compute_explained_variance
from temper_trainer.batching.samples import TURNS_AFTER, to_samples
from temper_trainer.batching.step_plan import (
    RoleLayout,
    StepPlan,
    describe_plan,
    drop_zero_advantage_samples,
    measure_plan,
    pack_mini_batch,
    plan_step,
)
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.loops.clock import StepClock
from temper_trainer.loops.controllers import Controllers
from temper_trainer.loops.interrupts import abandonable_late
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.sampling import collect
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.progress import advance_progress, track_progress
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.runtime.training_worker import UpdateResult
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.teacher.teacher_client import TEACHER_LOGPROBS, TEACHER_WEIGHTS
from temper_trainer.types import Rollout

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one RL step leaves."""

    metrics: Mapping[str, float]
    """Numbers for the log."""
    rollouts: Sequence[Rollout]
    """In the order of their sample ids."""
    controllers: Controllers
    """Of the next step."""


def rl_step(
    rooms: Rooms, *, step: int, objectives: Mapping[str, Objective], controllers: Controllers
) -> StepResult:
    """One RL step over the rooms.

    Args:
        rooms: open ones.
        step: its number, from 1.
        objectives: of the trained roles, by role.
        controllers: coefficients and running statistics.
    """
    clock = StepClock()
    begin = time.perf_counter()
    with clock.phase("rollout"), abandonable_late():
        collected = collect(rooms, step=step, clock=clock, moments=controllers.rewards)
    shares_device = isinstance(rooms.sampler, VllmSampler) and rooms.sampler.sleep()
    controllers = replace(controllers, rewards=collected.moments)
    metrics, controllers = train_on(
        rooms,
        collected.rollouts,
        step=step,
        objectives=objectives,
        controllers=controllers,
        clock=clock,
    )
    metrics = collected.metrics | metrics
    with clock.phase("weight_sync"):
        if shares_device:
            # The servers take their memory again as soon as weights come.
            for role in rooms.roles.values():
                role.release_cache()
        metrics |= rooms.publisher.publish(rooms.canary)
    clock.seconds["time/step_s"] = time.perf_counter() - begin
    metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / max(
        clock.seconds["time/rollout_s"], 1e-9
    )
    metrics["data/epoch"] = float(rooms.prompts.cursor.epoch)
    return StepResult(
        metrics={**metrics, **clock.seconds}, rollouts=collected.rollouts, controllers=controllers
    )


def train_on(
    rooms: Rooms,
    rollouts: Sequence[Rollout],
    *,
    step: int,
    objectives: Mapping[str, Objective],
    controllers: Controllers,
    clock: StepClock,
) -> tuple[dict[str, float], Controllers]:
    """Every update that a step's rollouts give; its metrics, and the controllers of the next step."""
    config = rooms.config
    samples = to_samples(rollouts, temperature=config.sampling.temperature)
    layouts = {name: RoleLayout.from_topology(role.topology) for name, role in rooms.roles.items()}
    plan = plan_step(
        samples,
        config.batching,
        layouts=layouts,
        seed=derive_seed(config.run.seed, "mini-batches", step),
    )
    if step == 1:
        rooms.log.print_line(describe_plan(plan, samples))
    with clock.phase("annotate"):
        samples = annotate(rooms, samples, plan)
    samples, teacher_metrics = ask_teachers(rooms, samples, rollouts=rollouts, clock=clock)
    samples, advantage_metrics, controllers = add_advantages(
        rooms, samples, rollouts=rollouts, controllers=controllers
    )
    if config.algorithm.reweight is not None:
        samples, plan, drawn = _draw_again(
            rooms, samples, rollouts=rollouts, step=step, layouts=layouts
        )
        advantage_metrics = advantage_metrics | drawn
    if can_skip_idle(config):
        plan = drop_zero_advantage_samples(
            plan,
            samples,
            role="actor",
            layout=layouts["actor"],
            max_tokens=config.batching.max_tokens,
        )
    with abandonable_late():  # the last place at which a stop request may abandon the step
        pass
    with clock.phase("update"):
        merged = update_roles(rooms, samples, plan, objectives=objectives, step=step)
    if "policy/entropy" in merged and not math.isnan(merged["policy/entropy"]):
        controllers = replace(
            controllers, entropy=controllers.entropy.updated(entropy=merged["policy/entropy"])
        )
    return measure_plan(
        plan, samples, role="actor"
    ) | advantage_metrics | teacher_metrics | merged, controllers


def _draw_again(
    rooms: Rooms,
    samples: SequenceBatch,
    *,
    rollouts: Sequence[Rollout],
    step: int,
    layouts: Mapping[str, RoleLayout],
) -> tuple[SequenceBatch, StepPlan, dict[str, float]]:
    """Samples drawn again by their rewards, under ids of their own, and their plan; advantages are those of the groups as sampled."""
    config, seed = rooms.config, rooms.config.run.seed
    assert config.algorithm.reweight is not None
    places = resample_by_reward(
        torch.tensor([rollout.reward for rollout in rollouts]),
        group_ids=samples.group_ids,
        config=config.algorithm.reweight,
        seed=derive_seed(seed, "reweight", step),
    )
    own = torch.arange(len(places))
    drawn = replace(samples.select(places), sample_ids=own, pack_group_ids=own)
    plan = plan_step(
        drawn, config.batching, layouts=layouts, seed=derive_seed(seed, "mini-batches", step)
    )
    return drawn, plan, {"reweight/distinct_share": len(places.unique()) / len(places)}


def annotate(rooms: Rooms, samples: SequenceBatch, plan: StepPlan) -> SequenceBatch:
    """Add old_logprobs, ref_logprobs and values, each by the micro-batches that the update will use."""
    algorithm, columns = rooms.config.algorithm, {}
    if measures_old_logprobs(rooms.config):
        columns["old_logprobs"] = _forward(
            rooms, samples, plan, role="actor", head_output=HeadOutput.LOGPROB
        )
    if "ref" in rooms.roles:
        columns["ref_logprobs"] = _forward(
            rooms, samples, plan, role="ref", head_output=HeadOutput.LOGPROB
        )
    if algorithm.kl_reference == "disabled_adapter":
        columns["ref_logprobs"] = _forward(
            rooms, samples, plan, role="actor", head_output=HeadOutput.LOGPROB, without_adapter=True
        )
    if algorithm.advantage == "gae":
        columns["values"] = _forward(
            rooms, samples, plan, role="critic", head_output=HeadOutput.VALUE
        )
    return samples.with_columns(columns)


def measures_old_logprobs(config: TrainerConfig) -> bool:
    """Whether a pass before the update measures the policy; see ``needs_old_logprobs``. A reward from teachers needs it too."""
    is_rewarded = bool(config.teachers) and config.distillation.apply_as == "reward"
    return is_rewarded or needs_old_logprobs(config.algorithm, config.batching)


def ask_teachers(
    rooms: Rooms, samples: SequenceBatch, *, rollouts: Sequence[Rollout], clock: StepClock
) -> tuple[SequenceBatch, dict[str, float]]:
    """Add the teachers' columns, where there are teachers."""
    if rooms.teachers is None:
        return samples, {}
    with clock.phase("teacher"), abandonable_late():
        columns, metrics = rooms.teachers.columns(
            samples, routes=[rollout.prompt.route for rollout in rollouts]
        )
    return samples.with_columns(columns), metrics


def can_skip_idle(config: TrainerConfig) -> bool:
    """Whether samples without an advantage add nothing to the actor's gradient, and no earlier pass fixed its micro-batches."""
    algorithm = config.algorithm
    has_other_terms = (
        algorithm.entropy_coef != 0
        or algorithm.entropy_target is not None
        or algorithm.kl_loss_coef > 0
    )
    is_taught = bool(config.teachers) and config.distillation.apply_as == "loss"
    return not has_other_terms and not is_taught and not measures_old_logprobs(config)


def _forward(
    rooms: Rooms,
    samples: SequenceBatch,
    plan: StepPlan,
    *,
    role: str,
    head_output: HeadOutput,
    without_adapter: bool = False,
) -> Tensor:
    return forward_pass(
        rooms.roles[role],
        samples,
        plan,
        role=role,
        head_output=head_output,
        without_adapter=without_adapter,
    )


def forward_pass(
    group: WorkerGroup,
    samples: SequenceBatch,
    plan: StepPlan,
    *,
    role: str,
    head_output: HeadOutput,
    without_adapter: bool = False,
) -> Tensor:
    """[T] answers of one role, or of the base of its adapter, over the mini-batches of the first pass."""
    parts = []
    for mini_batch in plan.first_pass:
        ids = samples.sample_ids[torch.tensor(mini_batch.indices)]
        share = pack_mini_batch(samples, mini_batch, role)
        parts.append(
            group.forward(
                share, outputs=[head_output], sample_ids=ids, without_adapter=without_adapter
            )
        )
    return gather_outputs(parts, sample_ids=samples.sample_ids).columns[head_output]


def add_advantages(
    rooms: Rooms, samples: SequenceBatch, *, rollouts: Sequence[Rollout], controllers: Controllers
) -> tuple[SequenceBatch, dict[str, float], Controllers]:
    """Advantages, for gae returns, and correction weights as columns; their metrics; the controllers with the next step's KL."""
    algorithm, columns, kl = rooms.config.algorithm, samples.columns, controllers.kl
    metrics: dict[str, float] = {}
    if "old_logprobs" in columns:
        metrics |= _mismatch(samples)
    token_kl = None
    if algorithm.kl_reward_coef > 0:
        token_kl = estimate_kl(
            columns["old_logprobs"],
            ref_logprobs=columns["ref_logprobs"],
            estimator=algorithm.kl_estimator,
        )
    estimated = estimate_advantages(
        algorithm,
        samples=samples,
        rewards=torch.tensor([rollout.reward for rollout in rollouts]),
        values=columns.get("values"),
        kl=token_kl,
        kl_coef=kl.coef,
        components=torch.tensor([rollout.components for rollout in rollouts])
        if algorithm.advantage == "gdpo"
        else None,
        component_weights=tuple(rooms.config.reward.components.values()),
        baselines=torch.tensor([rollout.baseline for rollout in rollouts])
        if algorithm.advantage == "remax"
        else None,
    )
    if token_kl is not None:
        per_completion = mean_sequence_kl(token_kl, samples=samples)
        metrics |= {"ref/kl": per_completion, "ref/kl_coef": kl.coef}
        kl = kl.updated(kl=per_completion, num_samples=samples.num_sequences)
    advantages, taught = _with_teacher_reward(
        rooms, samples, _over_turns(rooms, samples, estimated.advantages)
    )
    added = {"advantages": advantages}
    if estimated.returns is not None:
        added["returns"] = estimated.returns
    samples, corrected = _with_correction(rooms, samples.with_columns(added))
    return samples, metrics | estimated.metrics | taught | corrected, replace(controllers, kl=kl)


def _over_turns(rooms: Rooms, samples: SequenceBatch, advantages: Tensor) -> Tensor:
    """Advantages with the credit of earlier turns discounted, where there are several."""
    environment = rooms.config.environment
    if (
        environment is None
        or environment.turn_discount == 1.0
        or TURNS_AFTER not in samples.columns
    ):
        return advantages
    return discount_by_turn(
        advantages, turns_after=samples.columns[TURNS_AFTER], discount=environment.turn_discount
    )


def _with_teacher_reward(
    rooms: Rooms, samples: SequenceBatch, advantages: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The teachers' reward of each token added to its own advantage; in task distill it is all there is."""
    config = rooms.config.distillation
    if rooms.teachers is None or config.apply_as != "reward":
        return advantages, {}
    reward = config.coef * compute_teacher_reward(
        samples.columns["old_logprobs"],
        teacher_logprobs=samples.columns[TEACHER_LOGPROBS],
        weights=samples.columns[TEACHER_WEIGHTS],
        loss_mask=samples.loss_mask,
        estimator=config.kl_estimator,
        clamp=config.clamp,
    )
    metrics = {"distill/reward_mean": float(reward[samples.loss_mask].mean())}
    return (reward if rooms.config.task == "distill" else advantages + reward), metrics


def _mismatch(samples: SequenceBatch) -> dict[str, float]:
    columns = samples.columns
    found = compute_mismatch_metrics(
        columns["old_logprobs"],
        rollout_logprobs=columns["rollout_logprobs"],
        loss_mask=samples.loss_mask,
    )
    return _with_effective_share(found, {name: metric.result for name, metric in found.items()})


def _with_effective_share(
    metrics: Mapping[str, Metric], found: dict[str, float]
) -> dict[str, float]:
    """The numbers for the log, the effective sample share in place of the piece that it is made from."""
    if SQUARES not in metrics:
        return found
    kept = {name: value for name, value in found.items() if name != SQUARES}
    return {
        **kept,
        "mismatch/effective_sample_fraction": compute_effective_sample_fraction(metrics),
    }


def _with_correction(
    rooms: Rooms, samples: SequenceBatch
) -> tuple[SequenceBatch, dict[str, float]]:
    """The column of correction weights where they are asked for; with the sampler's log-probs as old ones where that is."""
    config, columns = rooms.config.algorithm.rollout_correction, samples.columns
    if config is None:
        return samples, {}
    added, metrics = {}, {}
    if config.level != "none" or config.reject_kl is not None:
        made = compute_rollout_correction(
            config,
            samples=samples,
            old_logprobs=columns["old_logprobs"],
            rollout_logprobs=columns["rollout_logprobs"],
        )
        added[CORRECTION_WEIGHTS], metrics = made.weights, made.metrics
    if config.proximal == "rollout":
        added["old_logprobs"] = columns["rollout_logprobs"]
    return samples.with_columns(added), metrics


def update_roles(
    rooms: Rooms,
    samples: SequenceBatch,
    plan: StepPlan,
    *,
    objectives: Mapping[str, Objective],
    step: int,
) -> dict[str, float]:
    """Every mini-batch of every pass, for every trained role."""
    found: dict[str, float] = {}
    for role, objective in objectives.items():
        metrics: list[Mapping[str, Metric]] = []
        for i, mini_batch in enumerate(_counted(plan.mini_batches, name=f"{role} mini-batches")):
            is_last = i == len(plan.mini_batches) - 1
            result = rooms.roles[role].update(
                pack_mini_batch(samples, mini_batch, role, objective=objective),
                is_last_of_step=is_last,
            )
            if i == 0 and "policy/ratio_error_max" in result.metrics:
                found["policy/first_ratio_error_max"] = result.metrics[
                    "policy/ratio_error_max"
                ].result
            if result.report.outcome == "nonfinite":
                rooms.log.print_line(
                    f"step {step}: {role} skipped a non-finite update; samples {result.report.sample_ids[:8]}"
                )
            metrics.append(update_metrics(result))
        merged = merge_metrics(metrics)
        named = {
            name if "/" in name else f"{role}/{name}": metric.result
            for name, metric in merged.items()
        }
        found |= _with_effective_share(merged, named)
        if isinstance(objective, ValueObjective):
            found["value/explained_variance"] = compute_explained_variance(merged)
    return found


def _counted(items: Sequence[T], *, name: str) -> Iterator[T]:
    """The items, counted as they are done."""
    with track_progress(name, total=len(items)):
        for item in items:
            yield item
            advance_progress(name)


def update_metrics(result: UpdateResult) -> dict[str, Metric]:
    """An update's metrics with loss, norm, rate and outcome in a form that merges over updates."""
    is_skipped = result.report.outcome == "nonfinite"
    return {
        **result.metrics,
        "loss": Metric(value=result.metrics["loss"].result),
        "grad_norm": Metric(
            value=0.0 if is_skipped else result.report.grad_norm, weight=float(not is_skipped)
        ),
        "skipped_updates": Metric(value=float(result.report.outcome != "stepped"), reduction="sum"),
        "lr": Metric(value=result.lr),
    }
