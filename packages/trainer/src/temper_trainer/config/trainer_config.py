"""The full configuration of a run, and the checks of settings that contradict each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.algorithm import AlgorithmConfig, BatchingConfig
from temper_trainer.config.data import DataConfig
from temper_trainer.config.distillation import DistillationConfig, TeacherConfig
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.reward import REWARD_MODEL, RewardConfig, ShapingConfig
from temper_trainer.config.rollout import (
    AsynchronyConfig,
    RolloutConfig,
    SamplingConfig,
    WeightSyncConfig,
)
from temper_trainer.config.run import RoleConfig, RunConfig, RuntimeConfig
from temper_trainer.config.tasks import GenerateConfig, PreferenceConfig, WarmStartConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Everything about a run, frozen; Hydra ends here."""

    task: Literal["rl", "sft", "distill", "dpo", "rm", "eval", "generate"] = "rl"
    """rl: sample, score, update; sft: supervised fine-tuning on data.train; distill: sample, ask teachers, update; dpo: learn from pairs of
    completions; rm: a reward model from such pairs; eval: score held-out completions; generate: write completions."""
    loop: Literal["sync", "one_step_off", "async"] = "sync"
    """task rl only. sync: a step samples with the newest weights; one_step_off: the next step's completions are sampled while this one
    trains; async: sampling never waits, bounded by asynchrony.max_staleness."""
    model_engine: str = "fsdp"
    """Which engine every role runs on, found by entry point; the config group of that name fills the roles' blocks."""
    use_legacy_worker_impl: Literal["auto", "enable", "disable"] = "disable"
    """disable (or false) is the engine path; enable (or true) trains through the deprecated workers of temper-legacy-shim, with their old
    numerics; auto is disable with a warning."""
    data: DataConfig
    """Problems."""
    actor: RoleConfig
    """The policy."""
    critic: RoleConfig | None = None
    """The value model; needed by gae, refused otherwise."""
    ref: RoleConfig | None = None
    """The frozen reference policy; needed where a KL coefficient is above 0, refused otherwise."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Of training rollouts."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The sampler."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scoring."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Optimisation."""
    teachers: Mapping[str, TeacherConfig] = field(default_factory=dict)
    """Frozen teachers by name, each on a resource pool of its own; task distill needs one, task rl may have some."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """What is learned from the teachers."""
    environment: EnvironmentConfig | None = None
    """Tools and turns; None is one completion for each rollout."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Of tasks dpo and rm."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """Of task generate."""
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    """Sizes."""
    asynchrony: AsynchronyConfig = field(default_factory=AsynchronyConfig)
    """loop async only."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """From the actor to the sampler."""
    warm_start: WarmStartConfig | None = None
    """A short SFT before RL; None begins from the actor's model as it is."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """Processes."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, place and habits."""

    def __post_init__(self) -> None:
        if problems := _conflicts(self):
            raise ConfigError("\n".join(problems))

    @property
    def max_completion_tokens(self) -> int:
        """Tokens that a training rollout may have after its prompt."""
        length = self.sampling.max_tokens
        return length if self.environment is None else self.environment.longest(length)

    @property
    def samples(self) -> bool:
        """Whether the task makes completions."""
        return self.task in ("rl", "distill", "eval", "generate")


def _conflicts(config: TrainerConfig) -> list[str]:
    """Settings that contradict each other or have no effect together, both keys named."""
    found: list[str] = []
    needs_critic = config.task == "rl" and config.algorithm.advantage == "gae"
    needs_kl = config.task == "rl" and (
        config.algorithm.kl_loss_coef > 0 or config.algorithm.kl_reward_coef > 0
    )
    needs_ref = (needs_kl and config.algorithm.kl_reference == "ref") or (
        config.task == "dpo" and config.preference.reference == "ref"
    )
    if needs_critic != (config.critic is not None):
        found.append(
            f"algorithm.advantage is {config.algorithm.advantage} and critic is {'set' if config.critic else 'not set'}: "
            "gae needs a critic, every other estimator and task sft take none."
        )
    if config.task == "sft" and config.ref is not None:
        found.append(
            "ref is set in task sft, which only imitates and has no reference policy: remove it (ref=none)."
        )
    elif config.task == "dpo" and needs_ref != (config.ref is not None):
        found.append(
            f"preference.reference is {config.preference.reference} and ref is {'set' if config.ref else 'not set'}: ref needs the ref "
            "role (ref=frozen), the others take none."
        )
    elif needs_ref != (config.ref is not None):
        found.append(
            f"algorithm.kl_loss_coef is {config.algorithm.kl_loss_coef}, algorithm.kl_reward_coef is "
            f"{config.algorithm.kl_reward_coef}, algorithm.kl_reference is {config.algorithm.kl_reference}, and ref is "
            f"{'set' if config.ref else 'not set'}: a coefficient above 0 needs the ref role unless the reference is the disabled adapter, "
            "and the ref role needs such a coefficient."
        )
    found += _sizes_that_do_not_fit(config)
    found += _adapters_that_do_not_fit(config, needs_kl=needs_kl)
    if config.samples:
        found += _rollouts_that_do_not_fit(config)
    if config.task in ("rl", "distill") and config.sampling.temperature == 0:
        found.append(
            "sampling.temperature is 0 (greedy) in task rl, where completions of a prompt would all be equal: set it above 0."
        )
    if config.task == "sft" and config.warm_start is not None:
        found.append("warm_start has no effect in task sft: remove it.")
    roles = {"actor": config.actor, "critic": config.critic, "ref": config.ref}
    for name, role in roles.items():
        if role is not None and role.num_workers > 1 and config.runtime.kind == "inline":
            found.append(
                f"{name}.num_workers is {role.num_workers}, but runtime.kind is inline, which runs one process: use ray."
            )
        if role is not None and role.num_workers % role.engine.replica_size:
            found.append(
                f"{name}.num_workers is {role.num_workers}, but the layout of {name}.engine spreads one copy of the model over "
                f"{role.engine.replica_size} ranks: set {name}.num_workers to a multiple of {role.engine.replica_size}, or lower the sizes "
                "of the layout."
            )
    expected = "reward_model" if config.task == "rm" else "language_model"
    if config.actor.engine.model.model_type != expected:
        own = config.actor.engine.model.model_type
        found.append(
            f"actor.engine.model.model_type is {own}: the actor is a {expected} in task {config.task}."
        )
    if config.critic is not None and config.critic.engine.model.model_type != "value_model":
        found.append(
            f"critic.engine.model.model_type is {config.critic.engine.model.model_type}: the critic is a value_model."
        )
    if config.ref is not None and config.ref.engine.optimizer is not None:
        found.append(
            "ref.engine.optimizer is set, but the reference policy is frozen: set ref.engine.optimizer to null."
        )
    return [*found, *task_problems(config), *reward_model_problems(config)]


def _adapters_that_do_not_fit(config: TrainerConfig, *, needs_kl: bool) -> list[str]:
    """Adapters where they have no effect, or would act twice."""
    found = []
    is_disabled_adapter = config.algorithm.kl_reference == "disabled_adapter"
    if is_disabled_adapter and not config.actor.engine.lora.is_enabled:
        found.append(
            "algorithm.kl_reference is disabled_adapter, but the actor has no adapter: set actor.engine.lora.rank and "
            "actor.engine.lora.alpha, or take the ref role (algorithm.kl_reference=ref)."
        )
    if is_disabled_adapter and not needs_kl:
        found.append(
            "algorithm.kl_reference is disabled_adapter, but algorithm.kl_loss_coef and algorithm.kl_reward_coef are 0, so there is no "
            "reference policy: set one of them, or remove algorithm.kl_reference."
        )
    if config.ref is not None and config.ref.engine.lora.rank > 0:
        found.append(
            f"ref.engine.lora.rank is {config.ref.engine.lora.rank}, but the reference policy is frozen: set it to 0."
        )
    if config.warm_start is not None and config.actor.engine.lora.path is not None:
        found.append(
            "warm_start is set and actor.engine.lora.path too: the warm start would merge that adapter into the model, and RL would go on "
            "from it a second time. Remove one of them."
        )
    return found


def _rollouts_that_do_not_fit(config: TrainerConfig) -> list[str]:
    """Transports, contents and log-probs that the sampler cannot have."""
    sync, sampler, kind, sampling = (
        config.weight_sync,
        config.rollout.sampler,
        config.runtime.kind,
        config.sampling,
    )
    fitting = {
        "vllm": ["shared_memory", "cuda_ipc", "collective"],
        "hf": ["in_process" if kind == "inline" else "object_store"],
    }[sampler]
    found = []
    if sync.transport not in ("auto", *fitting):
        found.append(
            f"weight_sync.transport is {sync.transport}, but with rollout.sampler {sampler} and runtime.kind {kind} it must be auto or "
            f"{' or '.join(fitting)}."
        )
    if sync.content == "adapter" and (sampler != "vllm" or not config.actor.engine.lora.is_enabled):
        found.append(
            f"weight_sync.content is adapter, but rollout.sampler is {sampler} and actor.engine.lora is "
            f"{'on' if config.actor.engine.lora.is_enabled else 'off'}: it needs rollout=vllm and an adapter; full sends an adapter merged."
        )
    if sync.content == "adapter" and sync.transport not in ("auto", "shared_memory"):
        found.append(
            f"weight_sync.transport is {sync.transport}, but weight_sync.content adapter travels as a file: use auto."
        )
    if sync.content == "adapter" and config.rollout.vllm.sleep_level == 2:
        found.append(
            "rollout.vllm.sleep_level is 2, which drops a server's weights, but weight_sync.content is adapter, which never sends the base "
            "again: use sleep_level 1, or content full."
        )
    devices = config.runtime.rollout_devices
    if devices and len(devices) != config.rollout.num_replicas:
        found.append(
            f"runtime.rollout_devices names {len(devices)} sets of devices, but rollout.num_replicas is {config.rollout.num_replicas}: "
            "name one for each replica."
        )
    if config.rollout.vllm.sleep_level and config.loop != "sync":
        found.append(
            f"rollout.vllm.sleep_level is {config.rollout.vllm.sleep_level}, but loop is {config.loop}, in which servers sample while the "
            "actor trains: set it to 0, or use loop=sync."
        )
    is_truncated = sampling.top_p < 1 or sampling.top_k > 0
    if sampler == "vllm" and sampling.temperature != 1 and is_truncated:
        found.append(
            f"sampling.temperature is {sampling.temperature} together with sampling.top_p {sampling.top_p} and sampling.top_k "
            f"{sampling.top_k}: vLLM reports log-probs either before temperature or after truncation, and training needs those between. "
            "Use temperature 1, or top_p 1 and top_k 0, or rollout=hf."
        )
    return found


def _sizes_that_do_not_fit(config: TrainerConfig) -> list[str]:
    """Lengths that exceed a cap; of task sft only the prompts' are known before the data is read."""
    prompt = config.data.max_prompt_tokens
    key = "actor.engine.model.architecture.max_position_embeddings"
    positions = config.actor.engine.model.architecture.get("max_position_embeddings")
    caps = {key: positions} if isinstance(positions, int) else {}
    if config.task in ("sft", "dpo", "rm"):
        return [
            f"{key} is {cap}, but data.max_prompt_tokens is {prompt}: raise the first or lower the other."
            for cap in caps.values()
            if prompt > cap
        ]
    name = "sampling.max_tokens" if config.environment is None else "the turns of environment"
    completion = {name: config.max_completion_tokens}
    found = _too_long(
        {"batching.max_tokens": config.batching.max_tokens} | caps,
        prompt=prompt,
        completion=completion,
    )
    if config.data.eval is not None:
        length = config.run.eval_sampling.max_tokens
        longest = length if config.environment is None else config.environment.longest(length)
        found += _too_long(
            caps, prompt=prompt, completion={"run.eval_sampling.max_tokens": longest}
        )
    return found


def _too_long(caps: Mapping[str, int], *, prompt: int, completion: Mapping[str, int]) -> list[str]:
    """One sentence per cap, by key, that a prompt and a completion, whose key says its longest, exceed together."""
    return [
        f"{key} is {cap}, but data.max_prompt_tokens ({prompt}) and {other} ({length}) allow samples of {prompt + length} tokens: "
        "raise the first or lower one of the others."
        for key, cap in caps.items()
        for other, length in completion.items()
        if prompt + length > cap
    ]


def task_problems(config: TrainerConfig) -> Iterator[str]:
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
        and not config.actor.engine.lora.is_enabled
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


def _data_problems(config: TrainerConfig) -> Iterator[str]:
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


def _placement_problems(config: TrainerConfig) -> Iterator[str]:
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
        if teacher.engine.lora.is_enabled:
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


def reward_model_problems(config: TrainerConfig) -> Iterator[str]:
    """What is wrong between the reward model, the rewards that ask it, and the runtime: one sentence each."""
    model, reward = config.reward.model, config.reward
    is_asked = REWARD_MODEL in (reward.components or (reward.function,))
    if model is None:
        if is_asked and config.samples:
            key = "reward.components" if reward.components else "reward.function"
            yield f"{key} names {REWARD_MODEL}, but there is none: set reward.model.engine.model={{path: ..., model_type: reward_model}}."
        return
    engine = model.engine
    if not is_asked:
        yield f"reward.model is set, but neither reward.function nor reward.components names {REWARD_MODEL}: name it, or remove the model."
    if engine.model.model_type != "reward_model":
        yield f"reward.model.engine.model.model_type is {engine.model.model_type}: set it to reward_model."
    if engine.model.path is None:
        yield "reward.model.engine.model.path is not set: a reward model from scratch knows nothing. Train one with task=rm."
    if engine.lora.is_enabled:
        yield "reward.model.engine.lora is set, but a reward model is frozen: merge the adapter into its model and remove it."
    if model.num_workers % engine.replica_size:
        yield (
            f"reward.model.num_workers is {model.num_workers}, but the layout of reward.model.engine spreads one copy of the model over "
            f"{engine.replica_size} ranks: set it to a multiple of {engine.replica_size}."
        )
    if config.runtime.kind == "inline" and model.num_workers > 1:
        yield f"reward.model.num_workers is {model.num_workers}, but runtime.kind is inline, which runs one process: use ray."
    if config.runtime.kind == "inline" and config.loop != "sync":
        yield (
            f"reward.model is set and loop is {config.loop}, which scores while the actor trains, but runtime.kind is inline, which runs "
            "both in one process: use runtime.kind=ray, or loop=sync."
        )
