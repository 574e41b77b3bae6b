"""Reject settings that the user wrote but that have no effect in this combination.

Only the command line and the user's own files count: a built-in group may set more than one run
needs.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.config.data import ArithmeticSource, DataSource
from temper_trainer.config.reward import REWARD_MODEL
from temper_trainer.config.run import (
    INFERENCE_TASKS,
    PREFERENCE_TASKS,
    RL_TASKS,
    ROLES,
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
    """Completes "KEY has no effect ..."; names the other key."""
    remedy: str = ""
    """Completes "remove it, or ...", if there is another remedy."""
    exceptions: str = ""
    """Keys within ``keys`` that do have an effect."""


_SAMPLED_EVALUATION_KEYS = (
    "run.eval_sampling run.eval_sampled run.eval_num_completions run.eval_solved_reward "
    "run.eval_answer_pattern"
)
"""Settings of the completions that evaluations sample and score."""


def check_ineffective_keys(config: TrainerConfig, *, set_by_user: Mapping[str, str]) -> None:
    """Raise if the user set keys without effect.

    Args:
        config: The full configuration.
        set_by_user: Origins of the keys from the command line and the user's files.

    Raises:
        ConfigError: With one line per key: the key, and the setting that makes it ineffective.
    """
    problems: dict[str, str] = {}
    for rule in _iterate_rules(config):
        for key, origin in set_by_user.items() if rule.applies else ():
            if is_within(key, *rule.keys.split()) and not is_within(key, *rule.exceptions.split()):
                remedy = f"remove it, or {rule.remedy}" if rule.remedy else "remove it"
                # The first reason only: a key is listed once.
                problems.setdefault(key, f"{key} ({origin}) has no effect {rule.reason}: {remedy}.")
    if problems:
        raise ConfigError("\n".join(problems.values()))


def _iterate_rules(config: TrainerConfig) -> Iterator[Rule]:
    yield from _iterate_reward_rules(config)
    yield from _iterate_task_rules(config)
    yield from _iterate_runtime_rules(config)
    yield from _run_rules(config)
    yield from _iterate_algorithm_rules(config)
    yield from _iterate_role_rules(config)
    yield from _iterate_data_rules(config)
    yield from _iterate_teacher_rules(config)


def _iterate_task_rules(config: TrainerConfig) -> Iterator[Rule]:
    task, is_supervised = config.task, config.task in SUPERVISED_TASKS
    for key, only in {"preference": "dpo", "rm": "rm", "generate": "generate"}.items():
        yield Rule(task != only, key, f"with a task other than {only}")
    remedy = "set warm_start.loss for a warm start"
    yield Rule(task != "sft", "sft", "with a task other than sft", remedy)
    keys = f"algorithm batching.num_mini_batches batching.num_passes {_SAMPLED_EVALUATION_KEYS}"
    reason = "with tasks sft, dpo and rm, which have no RL steps"
    yield Rule(is_supervised, keys, reason, "set task=rl")
    keys = "sampling rollout reward environments run.table_every run.num_table_rows"
    reason = "with tasks sft, dpo and rm, which sample nothing"
    yield Rule(is_supervised, keys, reason, "set task=rl")
    reason = "with a task that does not train on what it samples"
    remedy = "set task=rl or task=distill"
    yield Rule(task not in RL_TASKS, "loop asynchrony weight_sync", reason, remedy)
    remedy = "set teachers.NAME.engine.model.path"
    yield Rule(not config.has_teachers, "distillation", "without teachers", remedy)


def _iterate_reward_rules(config: TrainerConfig) -> Iterator[Rule]:
    reward, environment = config.reward, config.environment
    keys, reason = "reward.function reward.arguments", "with reward.components, which replaces it"
    yield Rule(bool(reward.components), keys, reason, "remove reward.components")
    is_named = reward.function in (REWARD_MODEL, *reward.defined_names)
    reason = "with a reward.function that is not a registered name or import path"
    yield Rule(is_named, "reward.arguments", reason, "set reward.functions.NAME.arguments")
    has_function = any(name not in (REWARD_MODEL, *reward.judges) for name in reward.get_parts())
    is_parallel = reward.num_workers > 0
    yield Rule(is_parallel, "reward.num_threads", "with reward.num_workers, which replace threads")
    keys = "reward.timeout_s reward.num_workers reward.num_threads reward.max_retries"
    yield Rule(not has_function, keys, "with a reward of models, which calls no function")
    yield Rule(
        environment is not None and environment.name == "agent",
        "environment.answer_start environment.answer_end environment.tool_timeout_s "
        "environment.tool_memory_mib",
        "with environment.name agent, whose agent runs its tools itself",
    )
    reason, remedy = "with an environment", "set environment.max_failure_fraction"
    yield Rule(environment is not None, "rollout.max_failure_fraction", reason, remedy)


def _iterate_runtime_rules(config: TrainerConfig) -> Iterator[Rule]:
    runtime, sync = config.runtime, config.weight_sync
    is_inline, is_hf = runtime.kind == "inline", config.rollout.sampler == "hf"
    owners = (*ROLES, "rollout", "reward.model", *(f"teachers.{name}" for name in config.teachers))
    keys = (
        "runtime.cpus_per_worker runtime.gpus_per_worker runtime.address runtime.worker_timeout_s "
        f"{' '.join(f'{owner}.pool' for owner in owners)}"
    )
    reason = "with runtime.kind inline, which has neither workers nor resource pools"
    yield Rule(is_inline, keys, reason, "set runtime.kind=ray")
    reason, remedy = "with a weight_sync.content other than delta", "set weight_sync.content=delta"
    yield Rule(sync.content != "delta", "weight_sync.max_changed_fraction", reason, remedy)
    yield Rule(
        is_hf and is_inline and sync.content == "full",
        "weight_sync.checksum weight_sync.bucket_bytes",
        "with rollout.sampler hf in the trainer's own process, where weights are not sent",
        "set rollout=vllm or runtime.kind=ray",
    )
    yield Rule(config.loop != "async", "asynchrony", "without loop async", "set loop=async")
    reason = "with runtime.kind ray, which assigns devices to servers"
    yield Rule(not is_inline, "runtime.rollout_devices", reason, "set runtime.kind=inline")
    reason = "with runtime.address, a cluster whose nodes listen on their own addresses"
    remedy = "give it to ray start --node-ip-address"
    yield Rule(runtime.address is not None, "runtime.bind_address", reason, remedy)
    has_servers = any(teacher.backend == "vllm" for teacher in config.teachers.values())
    keys = "runtime.rollout_devices"
    keys += "" if has_servers else " rollout.vllm runtime.rollout_python"
    yield Rule(is_hf, keys, "with rollout.sampler hf", "set rollout=vllm")
    keys, reason = "rollout.canary_tolerance", "with rollout.canary false"
    yield Rule(not config.rollout.canary, keys, reason, "turn the canary on")


def _run_rules(config: TrainerConfig) -> Iterator[Rule]:
    run, has_eval = config.run, bool(config.data.eval_sources)
    keys, reason = "run.prometheus_address", "without run.prometheus_port"
    yield Rule(run.prometheus_port is None, keys, reason, "set the port")
    reason = "with run.max_ckpt_to_keep null, which keeps all checkpoints"
    keeps_all = run.max_ckpt_to_keep is None
    # A key that the user set to its default asks for nothing and contradicts nothing.
    yield Rule(run.keep_every > 0 and keeps_all, "run.keep_every", reason)
    saves_once = run.save_every == 0 and run.save_interval_s is None
    reason = (
        "without run.save_every and run.save_interval_s, because the run waits for its last save"
    )
    yield Rule(run.save_in_background and saves_once, "run.save_in_background", reason)
    may_evaluate = config.task in ("rl", *SUPERVISED_TASKS)
    keys = f"run.eval_every {_SAMPLED_EVALUATION_KEYS}"
    reason = "without data.eval or data.eval_sets, the data to evaluate on"
    yield Rule(may_evaluate and not has_eval, keys, reason, "set data.eval.paths")
    keys = "run.eval_solved_reward run.eval_answer_pattern"
    reason = "with run.eval_num_completions 1, where pass@k and maj@k are not measured"
    yield Rule(run.eval_num_completions == 1, keys, reason, "raise run.eval_num_completions")
    reason = "with run.total_epochs, which sets the length of the run"
    yield Rule(run.total_epochs is not None, "run.total_steps", reason, "remove run.total_epochs")
    shows_none = config.task == "rl" and run.table_every == 0 and not has_eval
    reason = "with run.table_every 0, which shows no tables"
    yield Rule(shows_none, "run.num_table_rows", reason, "raise run.table_every")


def _iterate_algorithm_rules(config: TrainerConfig) -> Iterator[Rule]:
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    has_kl = algorithm.kl_loss_coef > 0 or algorithm.kl_reward_coef > 0
    keys = "algorithm.kl_estimator algorithm.kl_clamp"
    reason = "with algorithm.kl_loss_coef and algorithm.kl_reward_coef both 0"
    yield Rule(not has_kl, keys, reason, "set one of them")
    reason = f"with algorithm.kl_estimator {algorithm.kl_estimator}"
    yield Rule(not algorithm.kl_estimator.startswith("k3"), "algorithm.kl_clamp", reason, "use k3")
    estimator = algorithm.advantage
    whitens = isinstance(estimator, AdvantageEstimator) and estimator.whitens
    reason = f"with algorithm.advantage {estimator.name}, which always whitens"
    yield Rule(algorithm.whiten_advantages and whitens, "algorithm.whiten_advantages", reason)
    has_one_update = config.batching.num_mini_batches * config.batching.num_passes == 1
    is_on_policy = (
        config.task == "rl"
        and has_one_update
        and algorithm.kl_reward_coef == 0
        and (correction is None or not correction.replaces_old_logprobs)
    )
    keys = " ".join(
        f"algorithm.policy_loss.{key}" for key in ("clip_low", "clip_high", "dual_clip")
    )
    one_update = "with batching.num_mini_batches and batching.num_passes both 1, where the"
    reason, remedy = f"{one_update} policy's ratio is always 1", "raise one of them"
    yield Rule(is_on_policy, keys, reason, remedy)
    yield Rule(
        config.rollout.routing_replay == "old_policy" and has_one_update,
        "rollout.routing_replay",
        f"{one_update} only update has the weights of the old policy",
        "raise one of them, or set it to none or sampler",
    )


def _iterate_role_rules(config: TrainerConfig) -> Iterator[Rule]:
    for name, role in config.roles.items():
        key, model = f"{name}.engine", role.engine.model
        offload = ("optimizer", "load_optimizer_in", "optimizer_on_cpu")
        keys = " ".join([f"{key}.schedule", *(f"{key}.offload.{each}" for each in offload)])
        reason = f"with {key}.optimizer null, a frozen model"
        yield Rule(role.engine.optimizer is None, keys, reason)
        has_own_head = model.path is not None and model.model_type == "language_model"
        reason = f"with {key}.model.path, whose weights are loaded"
        yield Rule(has_own_head, f"{key}.model.seed", reason)
        reason = f"with {key}.model.architecture, which has no code to trust"
        yield Rule(model.path is None, f"{key}.model.trust_remote_code", reason)


def _iterate_teacher_rules(config: TrainerConfig) -> Iterator[Rule]:
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
        "with rollout.sampler hf, because servers of teachers never sleep, and read only "
        f"{', '.join(read)} of {vllm}",
        exceptions=" ".join(f"{vllm}.{key}" for key in read),
    )
    for name, teacher in config.teachers.items():
        key, has_server = f"teachers.{name}", teacher.backend == "vllm"
        used = ("model.path", "model.trust_remote_code", "precision.compute")
        used_keys = [f"{key}.engine.{setting}" for setting in used]
        reason = f"with {key}.backend vllm, which reads only {', '.join(used_keys)}"
        yield Rule(has_server, f"{key}.engine", reason, exceptions=" ".join(used_keys))
        why = "runtime.kind ray" if has_server else f"{key}.backend engine"
        reason = f"with {why}, because it is for backend vllm and runtime.kind inline"
        is_unused = not has_server or config.runtime.kind == "ray"
        yield Rule(is_unused, f"{key}.devices", reason)


def _iterate_data_rules(config: TrainerConfig) -> Iterator[Rule]:
    data, sources = config.data, config.sources
    warm_start = config.warm_start
    streams_warm_start = warm_start is not None and warm_start.data is None
    buffers = data.streaming and data.shuffle and (config.task == "sft" or streams_warm_start)
    yield Rule(
        not buffers,
        "data.streaming_buffer",
        "without data.streaming and data.shuffle in task sft or a warm start on data.train",
    )
    reason = "without data.train.messages_key, the field with full conversations"
    has_turns = data.train is not None and data.train.messages_key is not None
    yield Rule(not has_turns, "data.train_on", reason)
    is_sorted = any(source.difficulty_key is not None for source in sources.values())
    reason = "without data.train.difficulty_key, by which rows are sorted"
    yield Rule(not is_sorted, "data.shuffled_fraction", reason)
    key, remedy = "data.shuffled_fraction", "set data.shuffle=true"
    yield Rule(not data.shuffle, key, "without data.shuffle", remedy)
    has_agent = any(each.name == "agent" for each in config.all_environments.values())
    yield Rule(
        all(isinstance(source, ArithmeticSource) for source in sources.values()),
        # An agent writes chat messages itself.
        "data.tools_path" if has_agent else "data.chat_template data.tools_path",
        "with sources arithmetic, whose prompts are not chat messages",
    )
    for name, source in sources.items():
        for rule in _iterate_source_rules(name, source, config=config):
            yield rule._replace(keys=" ".join(f"{name}.{key}" for key in rule.keys.split()))


def _iterate_source_rules(
    name: str, source: DataSource, *, config: TrainerConfig
) -> Iterator[Rule]:
    """Yield the rules of a source, with keys below it."""
    is_trained, is_evaluated = name in config.data.train_sources, name in config.data.eval_sources
    task, kind, distillation = config.task, config.preference_kind, config.distillation
    form = f"with task {task} and preference {config.preference.name}"
    reason = f"{form}, because pairs are for task rm, and for task dpo unless preference is kto"
    yield Rule(kind != "pairs", "chosen_key rejected_key", reason)
    reason = "with pairs, whose completions are in chosen_key and rejected_key"
    yield Rule(kind == "pairs", "answer_key", reason)
    yield Rule(task != "rm", "margin_key", f"with task {task}, because margins are for task rm")
    reason = f"{form}, because labels are for task dpo with preference=kto"
    yield Rule(kind != "labels", "label_key", reason)
    reason = f"with {name}.messages_key, the field with full conversations"
    yield Rule(source.messages_key is not None, "prompt_key answer_key", reason)
    reason = "with data to train on, because categories are for data.eval and data.eval_sets"
    yield Rule(not is_evaluated, "category_key", reason)
    reason = f"with task {task}, whose evaluations have no categories"
    yield Rule(task in SUPERVISED_TASKS, "category_key", reason)
    is_unscored = not config.generates_completions or name == "warm_start.data"
    keys, reason = "reward reward_key environment", "with data that is not sampled or scored"
    yield Rule(is_unscored, keys, reason)
    yield Rule(not is_trained, "weight", "with data that is not mixed with other sources")
    is_only_source = is_trained and not config.data.train_sets
    yield Rule(is_only_source, "weight", "without other sources in data.train_sets to mix it with")
    is_unsorted = is_evaluated or task in (*PREFERENCE_TASKS, *INFERENCE_TASKS)
    reason = "with data that is not prompts or demonstrations to train on"
    yield Rule(is_unsorted, "difficulty_key", reason)
    reason = "with data that is not demonstrations of task sft or of a warm start"
    yield Rule(not _is_demonstrated(name, config), "loss_weight_key", reason)
    unsampled = "or with data that is not sampled to train on"
    has_given = distillation.off_policy_fraction > 0 and is_trained
    reason = f"without distillation.off_policy_fraction, {unsampled}"
    yield Rule(not has_given, "completion_key", reason)
    has_self_teacher = distillation.self_teacher is not None and is_trained
    reason = f"without distillation.self_teacher, {unsampled}"
    yield Rule(not has_self_teacher, "teacher_prompt_key", reason)
    yield Rule(not config.teachers, "route_key", "without teachers, which it selects")


def _is_demonstrated(name: str, config: TrainerConfig) -> bool:
    """Return True if task sft or a warm start imitates a source's rows."""
    if "warm_start.data" in config.sources:
        return name == "warm_start.data"
    if config.task == "sft":  # held-out loss has weights, too
        return True
    return config.warm_start is not None and name in config.data.train_sources
