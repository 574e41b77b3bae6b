"""Reject settings that the user wrote but that have no effect in this combination.

Only the command line and the user's own files count: a built-in group may set more than one run
needs.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

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
from temper_trainer.settings.names import is_within


class Rule(NamedTuple):
    """Keys that have no effect under a condition."""

    applies: bool
    """True if the condition holds in this configuration."""
    keys: str
    """Dotted keys and blocks, separated by spaces."""
    reason: str
    """Completes "KEY has no effect ..."; names the other key and the remedy."""
    exceptions: str = ""
    """Keys within ``keys`` that do have an effect."""


_SAMPLED_EVALUATION_KEYS = (
    "run.eval_sampling run.eval_sampled run.eval_num_completions run.eval_solved_reward "
    "run.eval_answer_pattern"
)
"""Settings of the completions that evaluations sample and score."""


def _task_rules(config: TrainerConfig) -> Iterator[Rule]:
    task = config.task
    for key, only, hint in (
        ("preference", "dpo", ""),
        ("rm", "rm", ""),
        ("sft", "sft", ", or set warm_start.loss for a warm start"),
        ("generate", "generate", ""),
    ):
        yield Rule(task != only, key, f"in a task other than {only}: remove it{hint}")
    is_supervised = task in SUPERVISED_TASKS
    yield Rule(
        is_supervised,
        f"algorithm batching.num_mini_batches batching.num_passes {_SAMPLED_EVALUATION_KEYS}",
        "with tasks sft, dpo and rm, which have no RL steps: remove it, or set task=rl",
    )
    yield Rule(
        is_supervised,
        "sampling rollout reward environments run.table_every run.num_table_rows",
        "with tasks sft, dpo and rm, which sample nothing: remove it, or set task=rl",
    )
    yield Rule(
        task not in RL_TASKS,
        "loop asynchrony weight_sync",
        "with a task that does not train on what it samples: remove it, or set task=rl or "
        "task=distill",
    )
    yield Rule(
        not config.has_teachers,
        "distillation",
        "without teachers: remove it, or set teachers.NAME.engine.model.path",
    )


def _reward_rules(config: TrainerConfig) -> Iterator[Rule]:
    reward, environment = config.reward, config.environment
    yield Rule(
        bool(reward.components),
        "reward.function reward.arguments",
        "with reward.components, which name the functions: remove one of them",
    )
    yield Rule(
        reward.function in (REWARD_MODEL, *reward.defined_names),
        "reward.arguments",
        "with a reward.function that is not a registered name or import path: remove it, or set "
        "reward.functions.NAME.arguments",
    )
    yield Rule(
        all(name in (REWARD_MODEL, *reward.judges) for name in reward.get_parts()),
        "reward.timeout_s reward.num_workers reward.num_threads reward.max_retries",
        "with a reward of models, which calls no function: remove it",
    )
    yield Rule(
        environment is not None and environment.name == "agent",
        "environment.answer_start environment.answer_end environment.tool_timeout_s "
        "environment.tool_memory_mib",
        "with environment.name agent, whose agent runs its tools itself: remove it",
    )


def _runtime_rules(config: TrainerConfig) -> Iterator[Rule]:
    is_inline, sampler = config.runtime.kind == "inline", config.rollout.sampler
    yield Rule(
        is_inline,
        "runtime.cpus_per_worker runtime.gpus_per_worker runtime.address runtime.worker_timeout_s",
        "with runtime.kind inline, which starts no workers: remove it, or set runtime.kind=ray",
    )
    teacher_pools = " ".join(f"teachers.{name}.pool" for name in config.teachers)
    yield Rule(
        is_inline,
        f"actor.pool critic.pool ref.pool rollout.pool reward.model.pool {teacher_pools}",
        "with runtime.kind inline, which has no resource pools: remove it, or set runtime.kind=ray",
    )
    yield Rule(
        config.weight_sync.content != "delta",
        "weight_sync.max_changed_fraction",
        "with a weight_sync.content other than delta: remove it, or set weight_sync.content=delta",
    )
    yield Rule(
        sampler == "hf" and is_inline and config.weight_sync.content == "full",
        "weight_sync.checksum weight_sync.bucket_bytes",
        "with rollout.sampler hf in the trainer's own process, where weights are not sent: "
        "remove it, or set rollout=vllm or runtime.kind=ray",
    )
    yield Rule(
        config.loop != "async", "asynchrony", "without loop async: remove it, or set loop=async"
    )
    yield Rule(
        not is_inline,
        "runtime.rollout_devices",
        "with runtime.kind ray, which assigns devices to servers: remove it, or set "
        "runtime.kind=inline",
    )
    if sampler != "vllm":
        has_servers = any(teacher.backend == "vllm" for teacher in config.teachers.values())
        others = "" if has_servers else " rollout.vllm runtime.rollout_python"
        reason = "with rollout.sampler hf: remove it, or set rollout=vllm"
        yield Rule(True, f"runtime.rollout_devices{others}", reason)
    yield Rule(
        not config.rollout.canary,
        "rollout.canary_tolerance",
        "with rollout.canary false: remove it, or turn the canary on",
    )


def _run_rules(config: TrainerConfig) -> Iterator[Rule]:
    run, has_eval = config.run, bool(config.data.eval_sources)
    yield Rule(
        run.prometheus_port is None,
        "run.prometheus_address",
        "without run.prometheus_port: remove it, or set the port",
    )
    yield Rule(
        config.task in ("rl", *SUPERVISED_TASKS) and not has_eval,
        f"run.eval_every {_SAMPLED_EVALUATION_KEYS}",
        "without data.eval or data.eval_sets, the data to evaluate on: set data.eval.paths, or "
        "remove it",
    )
    yield Rule(
        run.eval_num_completions == 1,
        "run.eval_solved_reward run.eval_answer_pattern",
        "with run.eval_num_completions 1, where pass@k and maj@k are not measured: raise it, or "
        "remove this key",
    )
    yield Rule(
        run.total_epochs is not None,
        "run.total_steps",
        "with run.total_epochs, which sets the length of the run: remove one of them",
    )
    yield Rule(
        config.task == "rl" and run.table_every == 0 and not has_eval,
        "run.num_table_rows",
        "with run.table_every 0, which shows no tables: remove it, or raise run.table_every",
    )


def _algorithm_rules(config: TrainerConfig) -> Iterator[Rule]:
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    has_one_update = config.batching.num_mini_batches * config.batching.num_passes == 1
    yield Rule(
        algorithm.kl_loss_coef == 0 and algorithm.kl_reward_coef == 0,
        "algorithm.kl_estimator algorithm.kl_clamp",
        "with algorithm.kl_loss_coef and algorithm.kl_reward_coef both 0: set one of them, or "
        "remove it",
    )
    yield Rule(
        config.task == "rl"
        and has_one_update
        and algorithm.kl_reward_coef == 0
        and (correction is None or not correction.replaces_old_logprobs),
        "algorithm.policy_loss.clip_low algorithm.policy_loss.clip_high "
        "algorithm.policy_loss.dual_clip",
        "with batching.num_mini_batches and batching.num_passes both 1, where the policy's ratio "
        "is always 1: raise one of them, or remove it",
    )
    yield Rule(
        config.rollout.routing_replay == "old_policy" and has_one_update,
        "rollout.routing_replay",
        "as old_policy with batching.num_mini_batches and batching.num_passes both 1, where the "
        "only update has the weights of the old policy: raise one of them, or set none or sampler",
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
    for iterate_rules in _RULES:
        for applies, keys, reason, exceptions in iterate_rules(config):
            for key, origin in set_by_user.items() if applies else ():
                if is_within(key, *keys.split()) and not is_within(key, *exceptions.split()):
                    # The first reason only: a key is listed once.
                    problems.setdefault(key, f"{key} ({origin}) has no effect {reason}.")
    if problems:
        raise ConfigError("\n".join(problems.values()))


def _teacher_rules(config: TrainerConfig) -> Iterator[Rule]:
    """Yield settings that a teacher's server does not read.

    It loads its weights from disk and never sleeps.
    """
    vllm = "rollout.vllm"
    read = (
        *("gpu_memory_utilization", "kv_cache_bytes", "enforce_eager", "start_timeout_s"),
        *("stall_timeout_s", "load_timeout_s", "max_restarts"),
    )
    yield Rule(
        config.rollout.sampler != "vllm"
        and any(teacher.backend == "vllm" for teacher in config.teachers.values()),
        vllm,
        "with rollout.sampler hf: servers of teachers never sleep, and read only "
        f"{', '.join(read)} of {vllm}. Remove it",
        exceptions=" ".join(f"{vllm}.{key}" for key in read),
    )
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}"
        used_keys = [
            f"{key}.engine.{setting}"
            for setting in ("model.path", "model.trust_remote_code", "precision.compute")
        ]
        yield Rule(
            teacher.backend == "vllm",
            f"{key}.engine",
            f"with {key}.backend vllm, which reads only {', '.join(used_keys)}: remove it",
            exceptions=" ".join(used_keys),
        )
        why = f"{key}.backend engine" if teacher.backend == "engine" else "runtime.kind ray"
        yield Rule(
            teacher.backend == "engine" or config.runtime.kind == "ray",
            f"{key}.devices",
            f"with {why}: it is for backend vllm and runtime.kind inline. Remove it",
        )


def _role_rules(config: TrainerConfig) -> Iterator[Rule]:
    for name, role in config.roles.items():
        key, model = f"{name}.engine", role.engine.model
        yield Rule(
            role.engine.optimizer is None,
            f"{key}.schedule {key}.offload.optimizer {key}.offload.load_optimizer_in "
            f"{key}.offload.optimizer_on_cpu",
            f"with {key}.optimizer null, a frozen model: remove it",
        )
        yield Rule(
            model.path is not None and model.model_type == "language_model",
            f"{key}.model.seed",
            f"with {key}.model.path, whose weights are loaded: remove it",
        )
        yield Rule(
            model.path is None,
            f"{key}.model.trust_remote_code",
            f"with {key}.model.architecture, which has no code to trust: remove it",
        )


def _data_rules(config: TrainerConfig) -> Iterator[Rule]:
    data, sources = config.data, config.sources
    yield Rule(
        not (data.streaming and data.shuffle),
        "data.streaming_buffer",
        "without data.streaming and data.shuffle: remove it",
    )
    yield Rule(
        data.train.messages_key is None,
        "data.train_on",
        "without data.train.messages_key, the field with full conversations: remove it",
    )
    yield Rule(
        all(source.difficulty_key is None for source in sources.values()),
        "data.shuffled_fraction",
        "without data.train.difficulty_key, by which rows are sorted: remove it",
    )
    yield Rule(
        not data.shuffle,
        "data.shuffled_fraction",
        "without data.shuffle: remove it, or set it to true",
    )
    has_agent = any(each.name == "agent" for each in config.all_environments.values())
    yield Rule(
        all(isinstance(source, ArithmeticSource) for source in sources.values()),
        # An agent writes chat messages itself.
        "data.tools_path" if has_agent else "data.chat_template data.tools_path",
        "with sources arithmetic, whose prompts are not chat messages: remove it",
    )
    for name, source in sources.items():
        for applies, keys, reason, _ in _source_rules(name, source, config=config):
            yield Rule(applies, " ".join(f"{name}.{key}" for key in keys.split()), reason)


def _source_rules(name: str, source: DataSource, *, config: TrainerConfig) -> Iterator[Rule]:
    """Yield the rules of a source, with keys below it."""
    is_trained, is_evaluated = name in config.data.train_sources, name in config.data.eval_sources
    kind, distillation = config.preference_kind, config.distillation
    unsampled = "or with data that is not sampled to train on: remove it"
    task = f"with task {config.task} and preference {config.preference.name}"
    yield Rule(
        kind != "pairs",
        "chosen_key rejected_key",
        f"{task}: pairs are for task rm, and for task dpo unless preference is kto. Remove it",
    )
    yield Rule(
        kind == "pairs",
        "answer_key",
        "with pairs, whose completions are in chosen_key and rejected_key: remove it",
    )
    yield Rule(
        config.task != "rm",
        "margin_key",
        f"with task {config.task}: margins are for task rm. Remove it",
    )
    yield Rule(
        kind != "labels",
        "label_key",
        f"{task}: labels are for task dpo with preference=kto. Remove it",
    )
    yield Rule(
        source.messages_key is not None,
        "prompt_key answer_key",
        f"with {name}.messages_key, the field with full conversations: remove one of them",
    )
    yield Rule(
        not is_evaluated,
        "category_key",
        "with data to train on: categories are for data.eval and data.eval_sets. Remove it",
    )
    yield Rule(
        config.task in SUPERVISED_TASKS,
        "category_key",
        f"with task {config.task}, whose evaluations have no categories: remove it",
    )
    yield Rule(
        not config.generates_completions or name == "warm_start.data",
        "reward reward_key",
        "with data whose completions are not scored: remove it",
    )
    yield Rule(
        not config.generates_completions or name == "warm_start.data",
        "environment",
        "with data that is not sampled: remove it",
    )
    yield Rule(
        not is_trained, "weight", "with data that is not mixed with other sources: remove it"
    )
    yield Rule(
        is_evaluated or config.task in (*PREFERENCE_TASKS, *INFERENCE_TASKS),
        "difficulty_key",
        "with data that is not prompts or demonstrations to train on: remove it",
    )
    yield Rule(
        not _is_demonstrated(name, config),
        "loss_weight_key",
        "with data that is not demonstrations of task sft or of a warm start: remove it",
    )
    yield Rule(
        distillation.off_policy_fraction == 0 or not is_trained,
        "completion_key",
        f"without distillation.off_policy_fraction, {unsampled}",
    )
    yield Rule(
        distillation.self_teacher is None or not is_trained,
        "teacher_prompt_key",
        f"without distillation.self_teacher, {unsampled}",
    )
    yield Rule(not config.teachers, "route_key", "without teachers, which it selects: remove it")


def _is_demonstrated(name: str, config: TrainerConfig) -> bool:
    """Return True if task sft or a warm start imitates a source's rows."""
    if "warm_start.data" in config.sources:
        return name == "warm_start.data"
    if config.task == "sft":  # held-out loss has weights, too
        return True
    return config.warm_start is not None and name in config.data.train_sources


_RULES = (
    _reward_rules,
    _task_rules,
    _runtime_rules,
    _run_rules,
    _algorithm_rules,
    _role_rules,
    _data_rules,
    _teacher_rules,
)
