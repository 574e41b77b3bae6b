"""Settings that a task needs, and those that contradict it: one sentence each, both keys named."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from temper_trainer.config.shaping import ShapingConfig

if TYPE_CHECKING:
    from temper_trainer.config.run import TrainerConfig


def task_problems(config: "TrainerConfig") -> Iterator[str]:
    """What is wrong between the task and its blocks."""
    if config.task == "distill" and not config.teachers:
        yield "task is distill, but there is no teacher: set teachers.NAME.engine.model.path."
    if config.teachers and config.task not in ("rl", "distill"):
        yield f"teachers are set in task {config.task}, which asks none: remove them, or set task=distill or task=rl."
    if config.task == "distill" and (
        config.algorithm.kl_loss_coef or config.algorithm.kl_reward_coef
    ):
        yield (
            "algorithm.kl_loss_coef and algorithm.kl_reward_coef have no effect in task distill, whose reference is the teacher: remove "
            "them."
        )
    if config.task == "distill" and config.algorithm.dynamic_sampling is not None:
        yield "algorithm.dynamic_sampling has no effect in task distill, which learns from every completion: remove it."
    if config.task == "distill" and config.algorithm.reweight is not None:
        yield "algorithm.reweight has no effect in task distill, whose completions have no rewards to be drawn by: remove it."
    if config.warm_start is not None and config.task in ("dpo", "rm", "eval", "generate"):
        yield f"warm_start has no effect in task {config.task}: remove it."
    if config.task in ("dpo", "rm") and config.data.train.kind == "arithmetic":
        yield f"data.train.kind is arithmetic, which has no pairs of completions for task {config.task}: give files with both."
    if (
        config.task == "dpo"
        and config.preference.reference == "disabled_adapter"
        and not config.actor.engine.lora.is_on
    ):
        yield "preference.reference is disabled_adapter, but the actor has no adapter: set actor.engine.lora.rank and alpha, or use ref."
    if (
        config.task in ("eval", "generate")
        and config.rollout.sampler == "vllm"
        and config.actor.engine.model.path is None
    ):
        yield (
            f"rollout.sampler is vllm in task {config.task}, but actor.engine.model.path is not set, so servers have no weights to read: "
            "give a model directory."
        )
    if (
        config.task == "generate"
        and config.generate.num_completions > 1
        and config.sampling.temperature == 0
    ):
        yield "generate.num_completions is above 1 and sampling.temperature is 0 (greedy), so all would be equal: raise the temperature."
    if config.algorithm.advantage == "gdpo" and not config.reward.components:
        yield "algorithm.advantage is gdpo, which normalises several rewards apart, but reward.components is empty: name them there."
    if config.algorithm.advantage == "gdpo" and config.reward.shaping != ShapingConfig():
        yield "reward.shaping has no effect with algorithm.advantage gdpo, which reads each reward as it was scored: remove it."
    yield from _data_problems(config)
    if config.teachers:
        yield from _placement_problems(config)


def _data_problems(config: "TrainerConfig") -> Iterator[str]:
    """Ways of reading that only supervised fine-tuning has."""
    data = config.data
    if config.task != "sft":
        only = {
            "data.streaming": data.streaming,
            "data.train.messages_key": data.train.messages_key is not None,
            "batching.tokens_per_update": config.batching.tokens_per_update is not None,
        }
        for key, is_set in only.items():
            if is_set:
                yield f"{key} has no effect in task {config.task}: it is of task sft. Remove it."
    if config.run.total_epochs is not None and (
        data.streaming or config.batching.tokens_per_update is not None
    ):
        yield (
            f"run.total_epochs is {config.run.total_epochs}, but with data.streaming or batching.tokens_per_update nobody knows how many "
            "steps a pass holds: give run.total_steps."
        )
    if data.streaming and data.tokenizer.kind != "pretrained":
        yield f"data.streaming is true, but data.tokenizer.kind {data.tokenizer.kind} learns from all rows first: use a pretrained one."
    if data.streaming and data.train.kind == "arithmetic":
        yield "data.streaming is true, but data.train.kind arithmetic generates its rows at once: remove it."


def _placement_problems(config: "TrainerConfig") -> Iterator[str]:
    """Teachers stand alone on their pools and stay awake."""
    roles = {"actor": config.actor, "critic": config.critic, "ref": config.ref}
    taken = {role.pool: f"{name}.pool" for name, role in roles.items() if role is not None} | {
        config.rollout.pool: "rollout.pool"
    }
    if config.reward.model is not None:
        taken[config.reward.model.pool] = "reward.model.pool"
    if len(config.teachers) > 1 and config.data.train.route_key is None:
        yield (
            f"there are {len(config.teachers)} teachers, but data.train.route_key is not set, so nothing says who teaches which prompt: "
            "set it to the field of a row that names the teacher, or its route."
        )
    routes: dict[str, str] = {}
    for name, teacher in config.teachers.items():
        if config.runtime.kind == "ray" and teacher.pool in taken:
            yield (
                f"teachers.{name}.pool is {teacher.pool!r}, and so is {taken[teacher.pool]}: a teacher that shares devices would have to "
                "sleep while the policy trains, and is asked while it samples, so there is no colocated mode. Give it a pool of its own."
            )
        if teacher.engine.residency.offloads_anything:
            yield f"teachers.{name}.engine.residency offloads, but a teacher on its own pool never sleeps: remove it."
        if teacher.engine.lora.is_on:
            yield f"teachers.{name}.engine.lora is set, but a teacher is frozen: merge the adapter into its model and remove it."
        if teacher.engine.model.model_type != "language_model":
            yield f"teachers.{name}.engine.model.model_type is {teacher.engine.model.model_type}: a teacher is a language_model."
        if teacher.devices and len(teacher.devices) != teacher.num_replicas:
            yield (
                f"teachers.{name}.devices names {len(teacher.devices)} sets of devices, but teachers.{name}.num_replicas is "
                f"{teacher.num_replicas}: name one for each replica."
            )
        is_one_process = config.runtime.kind == "inline" and teacher.backend == "engine"
        if is_one_process and (teacher.num_workers > 1 or teacher.num_replicas > 1):
            yield (
                f"teachers.{name}.num_workers is {teacher.num_workers} and num_replicas {teacher.num_replicas}, but runtime.kind is "
                "inline, which runs one process: use ray, or backend=vllm."
            )
        if teacher.backend == "vllm" and teacher.engine.model.path is None:
            yield f"teachers.{name}.backend is vllm, but teachers.{name}.engine.model.path is not set: give a model directory."
        if teacher.backend == "vllm" and config.sampling.temperature != 1:
            yield (
                f"teachers.{name}.backend is vllm, which gives log-probs of given tokens at temperature 1 only, but sampling.temperature "
                f"is {config.sampling.temperature}: set it to 1, or use teachers.{name}.backend=engine."
            )
        if teacher.backend == "engine" and teacher.num_workers % teacher.engine.replica_size:
            size = teacher.engine.replica_size
            yield (
                f"teachers.{name}.num_workers is {teacher.num_workers}, but the layout of teachers.{name}.engine spreads one copy of the "
                f"model over {size} ranks: set it to a multiple of {size}."
            )
        route = name if teacher.route is None else teacher.route
        if route in routes:
            yield f"teachers.{name} and teachers.{routes[route]} have one route, {route!r}: give each its own."
        routes[route] = name
