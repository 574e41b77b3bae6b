"""The training half of an RL step: measure log-probs, estimate advantages, update.

`temper_trainer.loops.rl_loop` has the full step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput, Objective
from temper_engine_api.outputs import gather_outputs
from temper_trainer.algorithms.adaptive_coefficients import EntropyController, KlController
from temper_trainer.algorithms.objectives.objective_factory import needs_old_logprobs
from temper_trainer.algorithms.objectives.value_loss import (
    ValueObjective,
    compute_explained_variance,
)
from temper_trainer.algorithms.resampling import Reweighting, resample_by_reward
from temper_trainer.batching.samples import split_branches, to_samples
from temper_trainer.batching.step_plan import (
    RoleLayout,
    StepPlan,
    describe_plan,
    drop_zero_advantage_samples,
    measure_plan,
    pack_mini_batch,
    plan_step,
)
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.distillation import EmaPolicy
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.loops.advantage_columns import add_advantages, replace_squares
from temper_trainer.loops.run.interrupts import allow_stop_after_half_grace
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.progress import StepTimer, advance_progress, track_progress
from temper_trainer.reward.scoring import RunningStats
from temper_trainer.runtime.placement import AVERAGED_ROLE
from temper_trainer.runtime.self_teacher import update_average
from temper_trainer.runtime.worker_group import UpdateResult, WorkerGroup
from temper_trainer.teacher.teacher_client import TeacherClient
from temper_trainer.types import Rollout

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Controllers:
    """State that changes from step to step besides weights and data position."""

    kl: KlController
    """Coefficient of the KL penalty on rewards."""
    entropy: EntropyController
    """Coefficient of the entropy bonus."""
    reward_stats: RunningStats = field(default_factory=RunningStats)
    """Statistics of all rewards so far, for ``reward.shaping.normalization=running``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one RL step."""

    metrics: Mapping[str, float]
    rollouts: Sequence[Rollout]
    """The trained rollouts, in the order of their sample ids."""
    controllers: Controllers
    """Controllers for the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedUpdates:
    """Everything that the updates of a step read, complete before the first one."""

    samples: SequenceBatch
    """Samples with all columns that the objectives read."""
    plan: StepPlan
    metrics: Mapping[str, float]
    """Metrics of samples, advantages and teachers."""
    kl_controller: KlController
    """Controller of the KL penalty for the next step."""


def train_on_rollouts(
    rollouts: Sequence[Rollout],
    *,
    config: TrainerConfig,
    roles: Mapping[str, WorkerGroup],
    teachers: TeacherClient | None,
    objectives: Mapping[str, Objective],
    controllers: Controllers,
    step: int,
    timer: StepTimer,
    log: RunLog,
) -> tuple[dict[str, float], Controllers]:
    """Run all updates in a step.

    Args:
        rollouts: The step's scored rollouts.
        config: Configuration of the run.
        roles: Workers by role.
        teachers: Teachers of on-policy distillation, if there are any.
        objectives: Objective per trained role.
        controllers: Controllers for this step.
        step: Number of the step, from 1.
        timer: Measures how long each operation takes.
        log: Log of the run.

    Returns:
        The metrics of the step, and the controllers for the next one.
    """
    prepared = _prepare_updates(
        rollouts,
        config=config,
        roles=roles,
        teachers=teachers,
        kl_controller=controllers.kl,
        step=step,
        timer=timer,
        log=log,
    )
    with allow_stop_after_half_grace():
        pass  # The last point at which a stop request may abandon the step: updates follow.
    with timer.measure("update"):
        update_metrics = update_roles(
            prepared.samples,
            prepared.plan,
            roles=roles,
            objectives=objectives,
            step=step,
            log=log,
        )
        if isinstance(self_teacher := config.distillation.self_teacher, EmaPolicy):
            update_average(roles[AVERAGED_ROLE], actor=roles["actor"], decay=self_teacher.decay)
    controllers = replace(controllers, kl=prepared.kl_controller)
    entropy = update_metrics.get("policy/entropy", math.nan)
    # NaN if the objective reports no entropy or no update measured one. The controller would lower
    # its coefficient then, because NaN < target is False.
    if not math.isnan(entropy):
        controllers = replace(controllers, entropy=controllers.entropy.adapt(entropy=entropy))
    return {**prepared.metrics, **update_metrics}, controllers


def _prepare_updates(
    rollouts: Sequence[Rollout],
    *,
    config: TrainerConfig,
    roles: Mapping[str, WorkerGroup],
    teachers: TeacherClient | None,
    kl_controller: KlController,
    step: int,
    timer: StepTimer,
    log: RunLog,
) -> _PreparedUpdates:
    """Measure log-probs, estimate advantages and plan the mini-batches; change no weights.

    For the arguments see `train_on_rollouts`.
    """
    algorithm = config.algorithm
    samples = to_samples(
        rollouts,
        temperature=config.sampling.temperature,
        overlong_filter=algorithm.overlong_filter,
    )
    # One per sample: an agent that has changed its history has several samples in a rollout.
    split_rollouts, parents = split_branches(rollouts)
    layouts = {name: RoleLayout.from_topology(role.topology) for name, role in roles.items()}
    plan_seed = derive_seed(config.run.seed, "mini-batches", step)
    plan = plan_step(samples, config.batching, layouts=layouts, seed=plan_seed)
    if step == 1:
        log.print_line(describe_plan(plan, samples))
    with timer.measure("forward"):
        samples = add_forward_columns(
            samples,
            plan,
            algorithm=algorithm,
            with_old_logprobs=needs_old_logprob_pass(config),
            with_experts=config.rollout.routing_replay == "old_policy",
            roles=roles,
        )
    samples = _replace_given_logprobs(samples, split_rollouts)
    samples, teacher_metrics = _add_teacher_columns(
        samples, split_rollouts, teachers=teachers, timer=timer
    )
    samples, metrics, kl_controller = add_advantages(
        samples, rollouts=rollouts, parents=parents, config=config, kl_controller=kl_controller
    )
    if algorithm.reweight is not None:
        # Do this after computing advantages, which use the groups as they were sampled.
        seed = derive_seed(config.run.seed, "reweight", step)
        samples, resampling_metrics = _resample(
            samples, rollouts, config=algorithm.reweight, seed=seed
        )
        # Lengths and denominators now belong to the drawn samples.
        plan = plan_step(samples, config.batching, layouts=layouts, seed=plan_seed)
        metrics = metrics | resampling_metrics
    # Late in a run most groups are all right or all wrong, and their passes would cost as much as
    # the other ones: docs/decisions/0003.
    if can_drop_zero_advantage(config):
        plan = drop_zero_advantage_samples(
            plan,
            samples,
            role="actor",
            layout=layouts["actor"],
            max_tokens=config.batching.max_tokens,
        )
    metrics = measure_plan(plan, samples, role="actor") | metrics | teacher_metrics
    if algorithm.overlong_filter:
        num_truncated = sum(rollout.is_truncated for rollout in rollouts)
        metrics["batch/overlong_fraction"] = num_truncated / len(rollouts)
    return _PreparedUpdates(
        samples=samples, plan=plan, metrics=metrics, kl_controller=kl_controller
    )


def needs_old_logprob_pass(config: TrainerConfig) -> bool:
    """Return True if a forward pass must measure the policy's log-probs before the updates.

    See `needs_old_logprobs`; a reward from teachers is computed from them, too.
    """
    has_teacher_reward = config.has_teachers and config.distillation.loss.is_reward
    return has_teacher_reward or needs_old_logprobs(config.algorithm, config.batching)


def can_drop_zero_advantage(config: TrainerConfig) -> bool:
    """Return True if zero-advantage samples can be left out without changing the actor's update.

    Every term of the objective must have the advantage as a factor, and no earlier forward pass may
    depend on the same micro-batches.
    """
    algorithm = config.algorithm
    has_other_terms = (
        algorithm.entropy_coef != 0
        or algorithm.entropy_controller is not None
        or algorithm.kl_loss_coef > 0
    )
    has_teacher_loss = config.has_teachers and not config.distillation.loss.is_reward
    return not has_other_terms and not has_teacher_loss and not needs_old_logprob_pass(config)


def add_forward_columns(
    samples: SequenceBatch,
    plan: StepPlan,
    *,
    algorithm: AlgorithmConfig,
    with_old_logprobs: bool,
    with_experts: bool,
    roles: Mapping[str, WorkerGroup],
) -> SequenceBatch:
    """Add the columns of forward passes, as far as the algorithm needs them.

    The columns are old_logprobs, ref_logprobs and values. `with_experts` adds the experts that the
    actor's routers choose before the first update. All updates of the step use the same experts.
    """
    columns: dict[str, Tensor] = {}
    requested = [HeadOutput.LOGPROB] if with_old_logprobs else []
    requested += [HeadOutput.ROUTED_EXPERTS] if with_experts else []
    if requested:
        actor = run_forward_outputs(
            samples, plan, role="actor", group=roles["actor"], outputs=requested
        )
        if with_old_logprobs:
            columns["old_logprobs"] = actor[HeadOutput.LOGPROB]
        if with_experts:
            columns[ROUTED_EXPERTS] = actor[HeadOutput.ROUTED_EXPERTS].to(torch.int16)
    if "ref" in roles:
        columns["ref_logprobs"] = run_forward(samples, plan, role="ref", group=roles["ref"])
    # The frozen base model is the reference, so no second model has to be in memory.
    if algorithm.kl_reference == "disabled_adapter":
        columns["ref_logprobs"] = run_forward(
            samples, plan, role="actor", group=roles["actor"], without_adapter=True
        )
    if algorithm.reads("values"):
        columns["values"] = run_forward(
            samples, plan, role="critic", group=roles["critic"], output=HeadOutput.VALUE
        )
    return samples.with_columns(columns)


def _replace_given_logprobs(samples: SequenceBatch, rollouts: Sequence[Rollout]) -> SequenceBatch:
    """Replace the sampler's log-probs of given completions, which have none, by the trainer's.

    The rollout correction then has nothing to correct: their weight is 1.
    """
    is_given = torch.tensor([rollout.completion.is_given for rollout in rollouts])
    if "old_logprobs" not in samples.columns or not is_given.any():
        return samples
    columns = samples.columns
    replaced = torch.where(
        is_given[samples.sequence_index], columns["old_logprobs"], columns["rollout_logprobs"]
    )
    return samples.with_columns({"rollout_logprobs": replaced})


def _add_teacher_columns(
    samples: SequenceBatch,
    rollouts: Sequence[Rollout],
    *,
    teachers: TeacherClient | None,
    timer: StepTimer,
) -> tuple[SequenceBatch, dict[str, float]]:
    """Add the scores of the teachers, if there are any; return their metrics, too."""
    if teachers is None:
        return samples, {}
    with timer.measure("teacher"), allow_stop_after_half_grace():
        columns, metrics = teachers.fetch_columns(
            samples, prompts=[rollout.prompt for rollout in rollouts]
        )
    return samples.with_columns(columns), metrics


def run_forward(
    samples: SequenceBatch,
    plan: StepPlan,
    *,
    role: str,
    group: WorkerGroup,
    output: HeadOutput = HeadOutput.LOGPROB,
    without_adapter: bool = False,
    before_part: Callable[[], object] = lambda: None,
) -> Tensor:
    """Run a role's forward pass over all samples, in the micro-batches of the first training pass.

    Args:
        samples: Samples of the step.
        plan: Plan of the step.
        role: Role whose plan is used.
        group: Workers of the role.
        output: Output of the head to return.
        without_adapter: Disable the role's LoRA adapter.
        before_part: Called before the forward pass of each mini-batch.

    Returns:
        [T], or [B] for scores, float32 output in sample order.
    """
    return run_forward_outputs(
        samples,
        plan,
        role=role,
        group=group,
        outputs=[output],
        without_adapter=without_adapter,
        before_part=before_part,
    )[output]


def run_forward_outputs(
    samples: SequenceBatch,
    plan: StepPlan,
    *,
    role: str,
    group: WorkerGroup,
    outputs: Sequence[HeadOutput],
    without_adapter: bool = False,
    before_part: Callable[[], object] = lambda: None,
) -> Mapping[HeadOutput, Tensor]:
    """Run a forward pass for several outputs; see `run_forward`."""
    results = []
    for mini_batch in plan.first_pass:
        before_part()
        packed = pack_mini_batch(samples, mini_batch, role)
        sample_ids = samples.sample_ids[torch.tensor(mini_batch.indices)]
        results.append(
            group.forward(
                packed, outputs=outputs, sample_ids=sample_ids, without_adapter=without_adapter
            )
        )
    return gather_outputs(results, sample_ids=samples.sample_ids).columns


def _resample(
    samples: SequenceBatch, rollouts: Sequence[Rollout], *, config: Reweighting, seed: int
) -> tuple[SequenceBatch, dict[str, float]]:
    """Resample by reward (``algorithm.reweight``) and assign new sample ids."""
    indices = resample_by_reward(
        torch.tensor([rollout.reward for rollout in rollouts]),
        group_ids=samples.group_ids,
        config=config,
        seed=seed,
    )
    # A sample may be drawn several times, but ids must be unique.
    new_ids = torch.arange(len(indices))
    resampled = replace(samples.select(indices), sample_ids=new_ids, pack_group_ids=new_ids)
    return resampled, {"reweight/distinct_fraction": len(indices.unique()) / len(indices)}


def update_roles(
    samples: SequenceBatch,
    plan: StepPlan,
    *,
    roles: Mapping[str, WorkerGroup],
    objectives: Mapping[str, Objective],
    step: int,
    log: RunLog,
) -> dict[str, float]:
    """Run every mini-batch of the plan on every trained role; return update metrics.

    Metrics without a ``/`` in their name get the role as prefix.
    """
    values: dict[str, float] = {}
    for role, objective in objectives.items():
        metrics: list[Mapping[str, Metric]] = []
        mini_batches = _track_items(plan.mini_batches, name=f"{role} mini-batches")
        for i, mini_batch in enumerate(mini_batches):
            packed = pack_mini_batch(samples, mini_batch, role, objective=objective)
            # A learning-rate schedule that counts RL steps advances after the last update only.
            is_last = i == len(plan.mini_batches) - 1
            result = roles[role].update(packed, is_last_of_step=is_last)
            if i == 0 and "policy/ratio_error_max" in result.metrics:
                # Before the first update the ratio must be 1, so this measures numerical errors.
                first_error = result.metrics["policy/ratio_error_max"].result
                values["policy/first_ratio_error_max"] = first_error
            if result.report.outcome == "nonfinite":
                log.print_line(
                    f"step {step}: {role} skipped a non-finite update; "
                    f"samples {result.report.sample_ids[:8]}"
                )
            metrics.append(collect_update_metrics(result))
        merged = merge_metrics(metrics)
        role_values = {
            name if "/" in name else f"{role}/{name}": metric.result
            for name, metric in merged.items()
        }
        values |= replace_squares(role_values, metrics=merged)
        if isinstance(objective, ValueObjective):
            values["value/explained_variance"] = compute_explained_variance(merged)
    return values


def _track_items(items: Sequence[T], *, name: str) -> Iterator[T]:
    """Yield the items and count each one as progress when the next one is requested."""
    with track_progress(name, total=len(items)):
        for item in items:
            yield item
            advance_progress(name)


def collect_update_metrics(result: UpdateResult) -> dict[str, Metric]:
    """Return the metrics of an update, including loss, gradient norm, learning rate and outcome.

    They can be merged over updates. A skipped update has no weight in the mean gradient norm,
    because its norm is not finite.
    """
    is_skipped = result.report.outcome == "nonfinite"
    return {
        **result.metrics,
        # The engine's metric is a sum over micro-batches, so merging it would add up the losses
        # from all updates. The new one is their mean.
        "loss": Metric(value=result.metrics["loss"].result),
        "grad_norm": Metric(
            value=0.0 if is_skipped else result.report.grad_norm, weight=float(not is_skipped)
        ),
        "skipped_updates": Metric(value=float(result.report.outcome != "stepped"), reduction="sum"),
        "lr": Metric(value=result.lr),
    }
