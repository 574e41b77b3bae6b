"""Reject settings that the user wrote but that have no effect in this combination.

Only the command line and the user's own files count: a built-in group may set more than one run
needs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import ArithmeticSource, DataSource
from temper_trainer.config.reward import REWARD_MODEL
from temper_trainer.config.run import (
    INFERENCE_TASKS,
    PREFERENCE_TASKS,
    RL_TASKS,
    SUPERVISED_TASKS,
)
from temper_trainer.config.trainer_config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Keys that have no effect under a condition."""

    keys: tuple[str, ...]
    """Dotted keys and blocks."""
    exceptions: tuple[str, ...] = ()
    """Keys within ``keys`` that do have an effect."""
    applies: Callable[[TrainerConfig], bool] = lambda _: True
    """Returns True if the keys have no effect in this configuration."""
    reason: str
    """Completes "KEY has no effect ..."; names the other key and the remedy."""


_SAMPLED_EVALUATION_KEYS = (
    "run.eval_sampling",
    "run.eval_sampled",
    "run.eval_num_completions",
    "run.eval_solved_reward",
    "run.eval_answer_pattern",
)
"""Settings of the completions that evaluations sample and score."""


_RL_STEP_KEYS = (
    "algorithm",
    "batching.num_mini_batches",
    "batching.num_passes",
    *_SAMPLED_EVALUATION_KEYS,
)
"""Keys of RL steps and their evaluations, which the supervised tasks do not have."""

_NO_POOLS = (
    "with runtime.kind inline, which has no resource pools: remove it, or set runtime.kind=ray"
)
_NO_SERVERS = "with rollout.sampler hf: remove it, or set rollout=vllm"

RULES = (
    Rule(
        keys=("reward.function", "reward.arguments"),
        applies=lambda config: bool(config.reward.components),
        reason="with reward.components, which name the functions: remove one of them",
    ),
    Rule(
        keys=("reward.arguments",),
        applies=lambda config: (
            config.reward.function in (REWARD_MODEL, *config.reward.defined_names)
        ),
        reason=(
            "with a reward.function that is not a registered name or import path: remove it, or "
            "set reward.functions.NAME.arguments"
        ),
    ),
    Rule(
        keys=("reward.timeout_s", "reward.num_workers", "reward.num_threads", "reward.max_retries"),
        applies=lambda config: all(
            name in (REWARD_MODEL, *config.reward.judges) for name in config.reward.get_parts()
        ),
        reason="with a reward of models, which calls no function: remove it",
    ),
    Rule(
        keys=tuple(
            f"environment.{key}"
            for key in ("answer_start", "answer_end", "tool_timeout_s", "tool_memory_mib")
        ),
        applies=lambda config: (
            config.environment is not None and config.environment.name == "agent"
        ),
        reason="with environment.name agent, whose agent runs its tools itself: remove it",
    ),
    Rule(
        keys=("data.streaming_buffer",),
        applies=lambda config: not (config.data.streaming and config.data.shuffle),
        reason="without data.streaming and data.shuffle: remove it",
    ),
    Rule(
        keys=("data.train_on",),
        applies=lambda config: config.data.train.messages_key is None,
        reason="without data.train.messages_key, the field with full conversations: remove it",
    ),
    Rule(
        keys=("distillation",),
        applies=lambda config: not config.has_teachers,
        reason="without teachers: remove it, or set teachers.NAME.engine.model.path",
    ),
    *(
        Rule(
            keys=(key,),
            applies=lambda config, task=task: config.task != task,  # type: ignore[misc]
            reason=f"in a task other than {task}: remove it{hint}",
        )
        for key, task, hint in (
            ("preference", "dpo", ""),
            ("rm", "rm", ""),
            ("sft", "sft", ", or set warm_start.loss for a warm start"),
            ("generate", "generate", ""),
        )
    ),
    Rule(
        keys=("run.prometheus_address",),
        applies=lambda config: config.run.prometheus_port is None,
        reason="without run.prometheus_port: remove it, or set the port",
    ),
    Rule(
        keys=(
            "runtime.cpus_per_worker",
            "runtime.gpus_per_worker",
            "runtime.address",
            "runtime.worker_timeout_s",
        ),
        applies=lambda config: config.runtime.kind == "inline",
        reason=(
            "with runtime.kind inline, which starts no workers: remove it, or set runtime.kind=ray"
        ),
    ),
    Rule(
        keys=("actor.pool", "critic.pool", "ref.pool", "rollout.pool", "reward.model.pool"),
        applies=lambda config: config.runtime.kind == "inline",
        reason=_NO_POOLS,
    ),
    Rule(
        keys=_RL_STEP_KEYS,
        applies=lambda config: config.task in SUPERVISED_TASKS,
        reason="with tasks sft, dpo and rm, which have no RL steps: remove it, or set task=rl",
    ),
    Rule(
        keys=(
            "sampling",
            "rollout",
            "reward",
            "environments",
            "run.table_every",
            "run.num_table_rows",
        ),
        applies=lambda config: config.task in SUPERVISED_TASKS,
        reason="with tasks sft, dpo and rm, which sample nothing: remove it, or set task=rl",
    ),
    Rule(
        keys=("loop", "asynchrony", "weight_sync"),
        applies=lambda config: config.task not in RL_TASKS,
        reason=(
            "with a task that does not train on what it samples: remove it, or set task=rl or "
            "task=distill"
        ),
    ),
    Rule(
        keys=("weight_sync.max_changed_fraction",),
        applies=lambda config: config.weight_sync.content != "delta",
        reason=(
            "with a weight_sync.content other than delta: remove it, or set "
            "weight_sync.content=delta"
        ),
    ),
    Rule(
        keys=("weight_sync.checksum", "weight_sync.bucket_bytes"),
        applies=lambda config: (
            config.rollout.sampler == "hf"
            and config.runtime.kind == "inline"
            and config.weight_sync.content == "full"
        ),
        reason=(
            "with rollout.sampler hf in the trainer's own process, where weights are not sent: "
            "remove it, or set rollout=vllm or runtime.kind=ray"
        ),
    ),
    Rule(
        keys=("asynchrony",),
        applies=lambda config: config.loop != "async",
        reason="without loop async: remove it, or set loop=async",
    ),
    Rule(
        keys=("runtime.rollout_devices",),
        applies=lambda config: config.runtime.kind == "ray",
        reason=(
            "with runtime.kind ray, which assigns devices to servers: remove it, or set "
            "runtime.kind=inline"
        ),
    ),
    Rule(
        keys=("rollout.vllm", "runtime.rollout_python"),
        applies=lambda config: (
            config.rollout.sampler != "vllm"
            and all(t.backend != "vllm" for t in config.teachers.values())
        ),
        reason=_NO_SERVERS,
    ),
    Rule(
        keys=("runtime.rollout_devices",),
        applies=lambda config: config.rollout.sampler != "vllm",
        reason=_NO_SERVERS,
    ),
    Rule(
        keys=("run.eval_every", *_SAMPLED_EVALUATION_KEYS),
        applies=lambda config: (
            config.task in ("rl", *SUPERVISED_TASKS) and not config.data.eval_sources
        ),
        reason=(
            "without data.eval or data.eval_sets, the data to evaluate on: set "
            "data.eval.paths, or remove it"
        ),
    ),
    Rule(
        keys=("run.eval_solved_reward", "run.eval_answer_pattern"),
        applies=lambda config: config.run.eval_num_completions == 1,
        reason=(
            "with run.eval_num_completions 1, where pass@k and maj@k are not measured: raise it, "
            "or remove this key"
        ),
    ),
    Rule(
        keys=("algorithm.kl_estimator", "algorithm.kl_clamp"),
        applies=lambda config: (
            config.algorithm.kl_loss_coef == 0 and config.algorithm.kl_reward_coef == 0
        ),
        reason=(
            "with algorithm.kl_loss_coef and algorithm.kl_reward_coef both 0: set one of them, or "
            "remove it"
        ),
    ),
    Rule(
        keys=tuple(
            f"algorithm.policy_loss.{name}" for name in ("clip_low", "clip_high", "dual_clip")
        ),
        applies=lambda config: (
            config.task == "rl"
            and config.batching.num_mini_batches * config.batching.num_passes == 1
            and config.algorithm.kl_reward_coef == 0
            and (
                config.algorithm.rollout_correction is None
                or not config.algorithm.rollout_correction.replaces_old_logprobs
            )
        ),
        reason=(
            "with batching.num_mini_batches and batching.num_passes both 1, where the policy's "
            "ratio is always 1: raise one of them, or remove it"
        ),
    ),
    Rule(
        keys=("rollout.routing_replay",),
        applies=lambda config: (
            config.rollout.routing_replay == "old_policy"
            and config.batching.num_mini_batches * config.batching.num_passes == 1
        ),
        reason=(
            "as old_policy with batching.num_mini_batches and batching.num_passes both 1, where "
            "the only update has the weights of the old policy: raise one of them, or set none or "
            "sampler"
        ),
    ),
    Rule(
        keys=("run.total_steps",),
        applies=lambda config: config.run.total_epochs is not None,
        reason="with run.total_epochs, which sets the length of the run: remove one of them",
    ),
    Rule(
        keys=("rollout.canary_tolerance",),
        applies=lambda config: not config.rollout.canary,
        reason="with rollout.canary false: remove it, or turn the canary on",
    ),
    Rule(
        keys=("run.num_table_rows",),
        applies=lambda config: (
            config.task == "rl" and config.run.table_every == 0 and not config.data.eval_sources
        ),
        reason="with run.table_every 0, which shows no tables: remove it, or raise run.table_every",
    ),
)


def check_ineffective_keys(config: TrainerConfig, *, set_by_user: Mapping[str, str]) -> None:
    """Raise if the user set keys without effect.

    Args:
        config: The full configuration.
        set_by_user: Origins of the keys from the command line and the user's files.

    Raises:
        ConfigError: One line per key, which names it and the key that makes it ineffective.
    """
    problems: dict[str, str] = {}
    for rule in (*RULES, *_role_rules(config), *_source_rules(config), *_teacher_rules(config)):
        if rule.applies(config):
            for key, origin in set_by_user.items():
                if _is_in(key, rule.keys) and not _is_in(key, rule.exceptions):
                    # The first reason only: a key is listed once.
                    problems.setdefault(key, f"{key} ({origin}) has no effect {rule.reason}.")
    if problems:
        raise ConfigError("\n".join(problems.values()))


def _is_in(key: str, blocks: tuple[str, ...]) -> bool:
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def _teacher_rules(config: TrainerConfig) -> Iterator[Rule]:
    """Yield settings that a teacher's server does not read.

    It loads its weights from disk and never sleeps.
    """
    teachers, vllm = config.teachers, "rollout.vllm"
    if config.rollout.sampler != "vllm" and any(
        teacher.backend == "vllm" for teacher in teachers.values()
    ):
        read = (
            "gpu_memory_utilization",
            "kv_cache_bytes",
            "enforce_eager",
            "start_timeout_s",
            "stall_timeout_s",
            "load_timeout_s",
            "max_restarts",
        )
        reason = (
            "with rollout.sampler hf: servers of teachers never sleep, and read only "
            f"{', '.join(read)} of {vllm}. Remove it"
        )
        exceptions = tuple(f"{vllm}.{key}" for key in read)
        yield Rule(keys=(vllm,), exceptions=exceptions, reason=reason)
    for name, teacher in teachers.items():
        key = f"teachers.{name}"
        if teacher.backend == "vllm":
            used_keys = (
                f"{key}.engine.model.path",
                f"{key}.engine.model.trust_remote_code",
                f"{key}.engine.precision.compute",
            )
            reason = f"with {key}.backend vllm, which reads only {', '.join(used_keys)}: remove it"
            yield Rule(keys=(f"{key}.engine",), exceptions=used_keys, reason=reason)
        if config.runtime.kind == "inline":
            yield Rule(keys=(f"{key}.pool",), reason=_NO_POOLS)
        if teacher.backend == "engine" or config.runtime.kind == "ray":
            why = f"{key}.backend engine" if teacher.backend == "engine" else "runtime.kind ray"
            yield Rule(
                keys=(f"{key}.devices",),
                reason=f"with {why}: it is for backend vllm and runtime.kind inline. Remove it",
            )


def _role_rules(config: TrainerConfig) -> Iterator[Rule]:
    for name, role in config.roles.items():
        model = role.engine.model
        if role.engine.optimizer is None:
            keys: tuple[str, ...] = (
                f"{name}.engine.schedule",
                f"{name}.engine.offload.optimizer",
                f"{name}.engine.offload.load_optimizer_in",
                f"{name}.engine.offload.optimizer_on_cpu",
            )
            yield Rule(
                keys=keys, reason=f"with {name}.engine.optimizer null, a frozen model: remove it"
            )
        if model.path is not None and model.model_type == "language_model":
            yield Rule(
                keys=(f"{name}.engine.model.seed",),
                reason=f"with {name}.engine.model.path, whose weights are loaded: remove it",
            )
        if model.path is None:
            keys = (f"{name}.engine.model.trust_remote_code",)
            yield Rule(
                keys=keys,
                reason=(
                    f"with {name}.engine.model.architecture, which has no code to trust: remove it"
                ),
            )


def _source_rules(config: TrainerConfig) -> Iterator[Rule]:
    sources = config.sources
    if all(source.difficulty_key is None for source in sources.values()):
        yield Rule(
            keys=("data.shuffled_fraction",),
            reason="without data.train.difficulty_key, by which rows are sorted: remove it",
        )
    elif not config.data.shuffle:
        yield Rule(
            keys=("data.shuffled_fraction",),
            reason="without data.shuffle: remove it, or set it to true",
        )
    if all(isinstance(source, ArithmeticSource) for source in sources.values()):
        has_agent = any(each.name == "agent" for each in config.all_environments.values())
        yield Rule(
            # An agent writes chat messages itself.
            keys=("data.tools_path",) if has_agent else ("data.chat_template", "data.tools_path"),
            reason="with sources arithmetic, whose prompts are not chat messages: remove it",
        )
    for name, source in sources.items():
        for applies, keys, reason in _iterate_source_rules(name, source, config=config):
            if applies:
                yield Rule(keys=tuple(f"{name}.{key}" for key in keys), reason=reason)


def _iterate_source_rules(
    name: str, source: DataSource, *, config: TrainerConfig
) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    """Yield for each rule whether it applies to a source, the source's keys, and the reason."""
    is_trained, is_evaluated = name in config.data.train_sources, name in config.data.eval_sources
    kind, distillation = config.preference_kind, config.distillation
    unsampled = "or with data that is not sampled to train on: remove it"
    task = f"with task {config.task} and preference {config.preference.name}"
    yield (
        kind != "pairs",
        ("chosen_key", "rejected_key"),
        f"{task}: pairs are for task rm, and for task dpo unless preference is kto. Remove it",
    )
    yield (
        kind == "pairs",
        ("answer_key",),
        "with pairs, whose completions are in chosen_key and rejected_key: remove it",
    )
    yield (
        config.task != "rm",
        ("margin_key",),
        f"with task {config.task}: margins are for task rm. Remove it",
    )
    yield (
        kind != "labels",
        ("label_key",),
        f"{task}: labels are for task dpo with preference=kto. Remove it",
    )
    yield (
        source.messages_key is not None,
        ("prompt_key", "answer_key"),
        f"with {name}.messages_key, the field with full conversations: remove one of them",
    )
    yield (
        not is_evaluated,
        ("category_key",),
        "with data to train on: categories are for data.eval and data.eval_sets. Remove it",
    )
    yield (
        config.task in SUPERVISED_TASKS,
        ("category_key",),
        f"with task {config.task}, whose evaluations have no categories: remove it",
    )
    yield (
        not config.generates_completions or name == "warm_start.data",
        ("reward", "reward_key"),
        "with data whose completions are not scored: remove it",
    )
    yield (
        not config.generates_completions or name == "warm_start.data",
        ("environment",),
        "with data that is not sampled: remove it",
    )
    yield not is_trained, ("weight",), "with data that is not mixed with other sources: remove it"
    yield (
        is_evaluated or config.task in (*PREFERENCE_TASKS, *INFERENCE_TASKS),
        ("difficulty_key",),
        "with data that is not prompts or demonstrations to train on: remove it",
    )
    yield (
        not _is_demonstrated(name, config),
        ("loss_weight_key",),
        "with data that is not demonstrations of task sft or of a warm start: remove it",
    )
    yield (
        distillation.off_policy_fraction == 0 or not is_trained,
        ("completion_key",),
        f"without distillation.off_policy_fraction, {unsampled}",
    )
    yield (
        distillation.self_teacher is None or not is_trained,
        ("teacher_prompt_key",),
        f"without distillation.self_teacher, {unsampled}",
    )
    yield not config.teachers, ("route_key",), "without teachers, which it selects: remove it"


def _is_demonstrated(name: str, config: TrainerConfig) -> bool:
    """Return True if task sft or a warm start imitates the rows of a source."""
    if "warm_start.data" in config.sources:
        return name == "warm_start.data"
    if config.task == "sft":  # held-out loss has weights, too
        return True
    return config.warm_start is not None and name in config.data.train_sources
