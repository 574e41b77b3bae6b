"""Settings of on-policy distillation: the teachers, and the loss or reward from their log-probs."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.algorithms.distillation_losses.sampled_token_losses import ReverseKl
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.data import DataSource
from temper_trainer.config.run import RL_TASKS, find_layout_conflicts, find_model_conflicts
from temper_trainer.settings.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Range
from temper_trainer.settings.variants import Custom, Variant, settings, variant


@settings
class TeacherConfig:
    """One frozen teacher on its own resource pool; it cannot be colocated."""

    backend: Literal["engine", "vllm"] = "engine"
    """engine: the run's model engine; vllm: a vLLM server."""
    engine: EngineConfig
    """Model, precision and layout. No optimizer is built, and nothing may be offloaded."""
    num_replicas: PositiveInt = 1
    """Number of copies, which requests are balanced over."""
    num_workers: PositiveInt = 1
    """Processes per replica; more than 1 needs runtime.kind=ray. With backend vllm: GPUs (or CPU
    processes) per server.
    """
    devices: tuple[str, ...] = ()
    """runtime inline and backend vllm only: value of CUDA_VISIBLE_DEVICES for the server of each
    replica, in order. If empty, every server sees the same devices as the training process.
    """
    pool: str = "teacher"
    """ray only: resource pool; must not be the pool of another role."""
    route: str | None = None
    """Value of data.train.route_key that selects this teacher; None takes the teacher's name."""
    weight: NonNegativeFloat = 1.0
    """Factor on the loss or reward from this teacher."""


class SelfTeacher(Variant):
    """The policy itself as the teacher, given the prompt in ``data.train.teacher_prompt_key``.

    That prompt may contain what the policy does not see, such as a solution. With teacher q, policy
    p, prompt x, privileged prompt x' and a completion y of the policy:

        divergence of p(y_t | x, y_<t) and sg(q(y_t | x', y_<t)) at each token t

    An alternative is a class with the decorator ``variant(name)``; its fields are its settings.

    Source: Zhao et al. 2026, "Self-Distilled Reasoner", arXiv:2601.18734.
    """

    __slots__ = ()


@variant("current")
class CurrentPolicy(SelfTeacher):
    """The policy before the updates of the step (arXiv:2601.18734)."""


@variant("ema")
class EmaPolicy(SelfTeacher):
    """Exponential moving average of the policy's weights: w = decay * w + (1 - decay) * policy.

    It is updated after each step, kept in float32, and saved in checkpoints.

    Source: Tarvainen and Valpola 2017, arXiv:1703.01780; for self-distillation Huebotter et al.
    2026, arXiv:2601.20802.
    """

    decay: Annotated[float, Range(at_least=0, below=1)] = 0.99
    """Fraction of the average that each step keeps. 0 is the policy after the last step."""


@settings
class DistillationConfig:
    """Loss or reward from the teachers' log-probs at the policy's own tokens."""

    objective: DistillationLoss | Custom = field(default_factory=ReverseKl)
    """Loss or reward per trained token, from docs/distillation.md, or ``package.module:Class``
    of one of your own.
    """
    self_teacher: SelfTeacher | None = None
    """Use the policy itself as the teacher, in place of teachers. None uses teachers."""
    off_policy_fraction: Annotated[float, Range(at_least=0, below=1)] = 0.0
    """Fraction of the prompts per step, rounded to whole prompts, that use the completion in
    data.train.completion_key in place of a sampled one (1 - lambda in arXiv:2306.13649). Only in
    task distill, and with objectives that have a top_k.
    """
    coef: PositiveFloat = 1.0
    """Weight of the distillation loss or reward."""
    clamp: PositiveFloat | None = None
    """Clamp each token's loss or reward to [-clamp, clamp]; None does not clamp."""
    timeout_s: PositiveFloat = 600.0
    """Maximum time in seconds to wait for a teacher."""
    tokenizer_mismatch: Literal["refuse", "map"] = "refuse"
    """Behavior if a teacher's tokenizer differs from the policy's. refuse: stop the run; map:
    translate token ids by text, and use only completions whose tokens all have a counterpart.
    """

    @property
    def loss(self) -> DistillationLoss:
        """The objective; one of your own is imported and constructed.

        Raises:
            ConfigError: If it cannot be imported, does not accept its arguments, or is a reward of
                more than the sampled token.
        """
        if not isinstance(self.objective, Custom):
            return self.objective
        loss = self.objective.build(DistillationLoss, key="distillation.objective")  # type: ignore[type-abstract]
        if loss.is_reward and loss.num_teacher_tokens:
            raise ConfigError(
                f"distillation.objective {self.objective.name} is a reward and reads "
                f"{loss.num_teacher_tokens} tokens of the teacher, but a reward is given for the "
                "sampled token: set is_reward to False, or let num_teacher_tokens return 0."
            )
        return loss


def find_teacher_conflicts(
    teachers: Mapping[str, TeacherConfig],
    *,
    pools: Mapping[str, str],
    is_ray: bool,
    temperature: float,
    has_route_key: bool,
) -> Iterator[str]:
    """Yield the conflicts between teachers and the rest of the configuration.

    Args:
        teachers: By name.
        pools: The resource pools of the run's other roles, each with the setting that names it.
        is_ray: True if runtime.kind is ray.
        temperature: Temperature of sampling, at which teachers compute log-probs.
        has_route_key: True if rows name the teacher that they are for.
    """
    if len(teachers) > 1 and not has_route_key:
        yield (
            f"there are {len(teachers)} teachers, but data.train.route_key is not set, so prompts "
            "cannot be assigned to teachers: set it to the field of a row that names the teacher, "
            "or its route."
        )
    routes: dict[str, str] = {}
    for name, teacher in teachers.items():
        if is_ray and teacher.pool in pools:
            yield (
                f"teachers.{name}.pool is {teacher.pool!r}, and so is {pools[teacher.pool]}: a "
                "teacher is queried while the policy samples, so it cannot be colocated. Give it "
                "its own pool."
            )
        yield from find_model_conflicts(
            f"teachers.{name}", teacher.engine, model_type="language_model", is_frozen=True
        )
        if teacher.engine.offload.offloads_anything:
            yield (
                f"teachers.{name}.engine.offload enables offloading, but a teacher has its own "
                "devices: remove it."
            )
        yield from _find_replica_conflicts(name, teacher, is_ray=is_ray, temperature=temperature)
        # If two teachers had the same route, the order of the keys would decide which is used.
        route = name if teacher.route is None else teacher.route
        if route in routes:
            yield (
                f"teachers.{name} and teachers.{routes[route]} have the same route {route!r}: "
                "give each a different one."
            )
        routes[route] = name


def _find_replica_conflicts(
    name: str, teacher: TeacherConfig, *, is_ray: bool, temperature: float
) -> Iterator[str]:
    """Yield a message for each of the teacher's settings that its backend does not support."""
    if teacher.devices and len(teacher.devices) != teacher.num_replicas:
        yield (
            f"teachers.{name}.devices names {len(teacher.devices)} sets of devices, but "
            f"teachers.{name}.num_replicas is {teacher.num_replicas}: name one for each "
            "replica."
        )
    if teacher.backend == "engine":
        yield from find_layout_conflicts(
            f"teachers.{name}", teacher.engine, num_workers=teacher.num_workers, is_ray=is_ray
        )
        if teacher.num_replicas > 1 and not is_ray:
            yield (
                f"teachers.{name}.num_replicas is {teacher.num_replicas}, but runtime.kind is "
                "inline, which runs one process: use ray, or backend=vllm."
            )
    if teacher.backend == "vllm" and teacher.engine.model.path is None:
        yield (
            f"teachers.{name}.backend is vllm, but teachers.{name}.engine.model.path is not "
            "set: give a model directory."
        )
    if teacher.backend == "vllm" and temperature != 1:
        yield (
            f"teachers.{name}.backend is vllm, which computes prompt log-probs only at "
            f"temperature 1, but sampling.temperature is {temperature}: set it to 1, or use "
            f"teachers.{name}.backend=engine."
        )


def find_distillation_conflicts(
    distillation: DistillationConfig,
    *,
    task: str,
    teachers: Mapping[str, TeacherConfig],
    algorithm: AlgorithmConfig,
    train_sources: Mapping[str, DataSource],
    prompts_per_step: int,
    has_environment: bool,
    has_legacy_workers: bool,
) -> Iterator[str]:
    """Yield settings that contradict the task distill, its teachers or given completions.

    Args:
        distillation: The loss or reward, and the policy as its own teacher.
        task: Task of the run.
        teachers: Other models as teachers, by name.
        algorithm: Algorithm of the run.
        train_sources: Training data by the key that sets it.
        prompts_per_step: Value of batching.prompts_per_step.
        has_environment: True if rollouts have several turns.
        has_legacy_workers: True if use_legacy_worker_impl is enable.
    """
    if task == "distill" and not teachers and distillation.self_teacher is None:
        yield (
            "task is distill, but there is no teacher: set teachers.NAME.engine.model.path, or "
            "distillation.self_teacher."
        )
    yield from _find_self_teacher_conflicts(
        distillation.self_teacher,
        task=task,
        teachers=teachers,
        train_sources=train_sources,
        has_legacy_workers=has_legacy_workers,
    )
    yield from _find_off_policy_conflicts(
        distillation,
        task=task,
        train_sources=train_sources,
        has_one_completion=algorithm.group_size == 1 and not has_environment,
        prompts_per_step=prompts_per_step,
    )
    if teachers and task not in RL_TASKS:
        yield (
            f"teachers are set in task {task}, which does not use them: remove them, or "
            "set task=distill or task=rl."
        )
    if task != "distill":
        return
    for key, is_set, reason in (
        ("kl_loss_coef", algorithm.kl_loss_coef > 0, "whose reference is the teacher"),
        ("kl_reward_coef", algorithm.kl_reward_coef > 0, "whose reference is the teacher"),
        ("dynamic_sampling", algorithm.dynamic_sampling, "which trains on every completion"),
        ("reweight", algorithm.reweight, "whose completions have no rewards"),
    ):
        if is_set:
            yield f"algorithm.{key} has no effect in task distill, {reason}: remove it."
    correction, objective = algorithm.rollout_correction, distillation.objective
    if (
        not isinstance(objective, Custom)
        and not objective.is_reward
        and correction is not None
        and correction.replaces_old_logprobs
    ):
        yield (
            f"algorithm.rollout_correction is {correction.name}, but a loss of distillation "
            f"(distillation.objective {objective.name}) has no ratio: use another correction, or "
            "distillation.objective=reverse_kl_reward."
        )


def _find_self_teacher_conflicts(
    teacher: SelfTeacher | None,
    *,
    task: str,
    teachers: Mapping[str, TeacherConfig],
    train_sources: Mapping[str, DataSource],
    has_legacy_workers: bool,
) -> Iterator[str]:
    """Yield conflicts of settings with `distillation.self_teacher`."""
    if teacher is None:
        return
    key = f"distillation.self_teacher is {teacher.name}"
    if task not in RL_TASKS:
        yield f"{key} in task {task}, which has no teachers: remove it."
    if teachers:
        yield (
            f"{key} and teachers.{next(iter(teachers))} is set: completions have one "
            "teacher, the policy itself or another model. Remove one of them."
        )
    without = [name for name, each in train_sources.items() if each.teacher_prompt_key is None]
    if without and isinstance(teacher, CurrentPolicy):
        yield (
            f"{key}, but {without[0]}.teacher_prompt_key is not set: with the same prompt, policy "
            "and teacher are equal and nothing is learned. Set it to the field with the teacher's "
            "prompt."
        )
    if has_legacy_workers:
        yield (
            f"{key}, but use_legacy_worker_impl is enable, and the deprecated workers cannot be a "
            "teacher: set it to disable."
        )


def _find_off_policy_conflicts(
    distillation: DistillationConfig,
    *,
    task: str,
    train_sources: Mapping[str, DataSource],
    has_one_completion: bool,
    prompts_per_step: int,
) -> Iterator[str]:
    """Yield settings that contradict given completions in place of the policy's."""
    fraction, objective = distillation.off_policy_fraction, distillation.objective
    if fraction == 0:
        return
    key = f"distillation.off_policy_fraction is {fraction}"
    for name, source in train_sources.items():
        if source.completion_key is None:
            yield (
                f"{key}, but {name}.completion_key is not set: set it to the field with the given "
                "completion."
            )
    if task != "distill":
        yield (
            f"{key} in task {task}, but only task distill can train on completions that the "
            "policy has not sampled: remove it."
        )
    if not isinstance(objective, Custom) and objective.num_teacher_tokens == 0:
        yield (
            f"{key} and distillation.objective is {objective.name}, whose estimate is wrong for "
            "tokens that the policy has not sampled: use top_k_reverse_kl, forward_kl or "
            "jensen_shannon."
        )
    if not has_one_completion:
        yield (
            f"{key}, but a prompt has one given completion of one turn: set algorithm.group_size=1 "
            "and no environment."
        )
    if 0 < fraction * prompts_per_step < 0.5:
        yield (
            f"{key} of batching.prompts_per_step {prompts_per_step}, which rounds "
            "to 0 prompts: raise one of them."
        )
