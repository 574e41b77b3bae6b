"""The full configuration of a run, and the checks for settings that contradict each other."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig, LoraSpec, OffloadSpec
from temper_trainer.algorithms.preference_losses.preference_loss import PreferenceLoss
from temper_trainer.algorithms.preference_losses.reference_losses import Dpo
from temper_trainer.algorithms.sft_losses import CrossEntropy, SftLoss
from temper_trainer.config.algorithm import (
    AlgorithmConfig,
    BatchingConfig,
    list_estimators_with_input,
)
from temper_trainer.config.data import (
    ArithmeticSource,
    DataConfig,
    DataSource,
    PreferenceKind,
    find_data_conflicts,
)
from temper_trainer.config.distillation import (
    DistillationConfig,
    EmaPolicy,
    TeacherConfig,
    find_distillation_conflicts,
    find_teacher_conflicts,
)
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.reward import (
    RewardConfig,
    find_component_conflicts,
    find_reward_conflicts,
)
from temper_trainer.config.rollout import (
    RECORD_FILE,
    AsynchronyConfig,
    RolloutConfig,
    SamplingConfig,
    WeightSyncConfig,
    find_rollout_conflicts,
)
from temper_trainer.config.run import (
    INFERENCE_TASKS,
    PREFERENCE_TASKS,
    RL_TASKS,
    ROLES,
    SUPERVISED_TASKS,
    RoleConfig,
    RunConfig,
    RuntimeConfig,
    find_layout_conflicts,
    find_model_conflicts,
)
from temper_trainer.config.run_folder_checks import RESERVED_NAMES
from temper_trainer.config.tasks import GenerateConfig, RewardModelTaskConfig, WarmStartConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """All settings of a run."""

    task: Literal["rl", "sft", "distill", "dpo", "rm", "eval", "generate"] = "rl"
    """rl: sample, score, update; sft: supervised fine-tuning on data.train; distill: sample, query
    teachers, update; dpo: preference optimization on pairs of completions or labeled ones; rm:
    train a reward model on pairs; eval: score held-out completions; generate: write completions to
    a file.
    """
    loop: Literal["sync", "one_step_off", "async"] = "sync"
    """Tasks rl and distill only. sync: each step samples with the newest weights; one_step_off: the
    next step's completions are sampled while this one trains; async: sampling runs continuously,
    bounded by asynchrony.max_staleness.
    """
    model_engine: str = "fsdp"
    """Engine of all roles, found by entry point. The config group of the same name sets the
    defaults of the roles.
    """
    use_legacy_worker_impl: Literal["auto", "enable", "disable"] = "disable"
    """disable (or false): use the engine; enable (or true): train with the deprecated workers of
    temper-legacy-shim and their numerics; auto: same as disable, with a warning.
    """
    data: DataConfig
    actor: RoleConfig
    """The policy that is trained, or evaluated in tasks eval and generate."""
    critic: RoleConfig | None = None
    """The value model; required by estimators that use its values, such as gae and vapo, not
    allowed otherwise.
    """
    ref: RoleConfig | None = None
    """The frozen reference policy; required if a KL coefficient is above 0, not allowed otherwise.
    """
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling parameters of training rollouts."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The sampler of completions and its servers."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    teachers: Mapping[str, TeacherConfig] = field(default_factory=dict)
    """Frozen teachers by name; required by task distill, optional in task rl."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """Loss or reward from the teachers."""
    environment: EnvironmentConfig | None = None
    """Tools and turns; None samples one completion per rollout."""
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    """Environments by name, for data sources with the setting ``environment``."""
    sft: SftLoss = field(default_factory=CrossEntropy)
    """Loss of task sft; that of a warm start is warm_start.loss."""
    preference: PreferenceLoss = field(default_factory=Dpo)
    """Loss of task dpo."""
    rm: RewardModelTaskConfig = field(default_factory=RewardModelTaskConfig)
    """Task rm only."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """Completions and output file of task generate."""
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    asynchrony: AsynchronyConfig = field(default_factory=AsynchronyConfig)
    """Limits of sampling ahead; loop async only."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    warm_start: WarmStartConfig | None = None
    """SFT before RL; None starts from the actor's model."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        # All conflicts at once, so that a user can correct them in one round.
        if conflicts := list(_find_conflicts(self)):
            raise ConfigError("\n".join(conflicts))

    @property
    def max_completion_tokens(self) -> int:
        """Maximum number of tokens after the prompt of a training rollout."""
        return self.compute_max_rollout_tokens(self.sampling.max_tokens)

    def compute_max_rollout_tokens(self, length: int) -> int:
        """Return the maximum number of tokens after a prompt, given the maximum per completion."""
        if not self.all_environments:
            return length
        environments = [
            self.environment
            if source.environment is None
            # An unknown name is reported as a conflict.
            else self.environments.get(source.environment)
            for source in self.data.sources.values()
        ]
        return max(
            length if each is None else each.compute_max_rollout_tokens(length)
            for each in environments or [self.environment]
        )

    @property
    def all_environments(self) -> Mapping[str, EnvironmentConfig]:
        """All environments by their keys."""
        default = {} if self.environment is None else {"environment": self.environment}
        return default | {f"environments.{name}": each for name, each in self.environments.items()}

    def get_environment(self, name: str) -> EnvironmentConfig | None:
        """Return the environment of a prompt; None if it has a single turn."""
        return self.environments[name] if name else self.environment

    @property
    def phase(self) -> str:
        """Name of the task's main phase in checkpoints and metrics."""
        # Task distill runs the RL loop and saves the same state.
        return "rl" if self.task == "distill" else self.task

    @property
    def preference_kind(self) -> PreferenceKind | None:
        """Form of the training data in tasks dpo and rm; None in other tasks."""
        if self.task == "rm":
            return "pairs"
        if self.task != "dpo":
            return None
        return "pairs" if self.preference.is_paired else "labels"

    @property
    def sources(self) -> dict[str, DataSource]:
        """All sources of data by the key that sets them."""
        own = None if self.warm_start is None else self.warm_start.data
        warm_start = {} if own is None else {"warm_start.data": own}
        return self.data.sources | warm_start

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """The models that the run has, by the key of their settings."""
        roles = {name: getattr(self, name) for name in ROLES}
        return {name: role for name, role in roles.items() if role is not None}

    @property
    def models(self) -> dict[str, EngineConfig]:
        """The engines of all roles, the reward model and the teachers, by the key of the block."""
        reward = {} if self.reward.model is None else {"reward.model": self.reward.model}
        teachers = {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        return {key: each.engine for key, each in (self.roles | reward | teachers).items()}

    @property
    def trained_roles(self) -> dict[str, RoleConfig]:
        """The models that the run trains: all roles but the frozen reference."""
        return {name: role for name, role in self.roles.items() if name != "ref"}

    @property
    def has_teachers(self) -> bool:
        """True if teachers score the completions: other models, or the policy itself."""
        return bool(self.teachers) or self.distillation.self_teacher is not None

    @property
    def averaged_engine(self) -> EngineConfig | None:
        """The engine of the policy's moving average; None if no teacher is one."""
        if not isinstance(self.distillation.self_teacher, EmaPolicy):
            return None
        engine = self.actor.engine
        return replace(
            engine,
            optimizer=None,
            # In bf16, an average that changes by less than 0.4 % per step would not move.
            precision=replace(engine.precision, compute="fp32", parameters="fp32"),
            offload=OffloadSpec(),
            # The exported weights of the actor contain its adapter.
            lora=LoraSpec(),
        )

    @property
    def generates_completions(self) -> bool:
        """True if the task samples completions."""
        return self.task in (*RL_TASKS, *INFERENCE_TASKS)


def _find_conflicts(config: TrainerConfig) -> Iterator[str]:
    """Yield one sentence per contradiction or ineffective combination, which names both keys."""
    yield from _find_optional_role_conflicts(config)
    yield from _find_size_conflicts(config)
    yield from _find_adapter_conflicts(config)
    if config.generates_completions:
        yield from find_rollout_conflicts(
            config.rollout,
            sync=config.weight_sync,
            sampling=config.sampling,
            loop=config.loop,
            kind=config.runtime.kind,
            devices=config.runtime.rollout_devices,
            bind_address=config.runtime.bind_address if config.task in RL_TASKS else None,
            has_adapter=config.actor.engine.lora.is_enabled,
            actor_device=config.actor.engine.device,
        )
    yield from _find_greedy_conflicts(config)
    yield from _find_role_conflicts(config)
    yield from _find_task_conflicts(config)
    yield from _find_environment_conflicts(config)
    yield from find_reward_conflicts(
        config.reward,
        sources=config.data.sources,
        loop=config.loop,
        is_ray=config.runtime.kind == "ray",
        generates_completions=config.generates_completions,
    )


_ALL_EQUAL = "all completions of a prompt would be equal"


def _find_greedy_conflicts(config: TrainerConfig) -> Iterator[str]:
    """Yield settings that ask for several completions of a prompt, but sample greedily."""
    run, num_completions = config.run, config.generate.num_completions
    greedy = config.sampling.greedy_cause
    has_zero_temperature = config.sampling.temperature == 0
    remedy = "raise the temperature" if has_zero_temperature else "set top_k to 0 for all tokens"
    # With top_k=1 log-probs are those of all tokens, so that a single completion can be trained.
    is_refused = has_zero_temperature or (greedy and config.algorithm.group_size > 1)
    if is_refused and config.task in RL_TASKS:
        yield f"sampling.{greedy} in task {config.task}, so {_ALL_EQUAL}: {remedy}."
    if greedy and config.task == "generate" and num_completions > 1:
        key = f"generate.num_completions is {num_completions}"
        yield f"{key} and sampling.{greedy}, so {_ALL_EQUAL}: {remedy}."
    is_sampled = run.eval_sampled and not greedy
    if run.eval_num_completions > 1 and run.eval_sampling.greedy_cause and not is_sampled:
        yield (
            f"run.eval_num_completions is {run.eval_num_completions}, but evaluations are greedy, "
            f"so {_ALL_EQUAL}: set run.eval_sampled=true or run.eval_sampling.temperature above 0."
        )


def _find_environment_conflicts(config: TrainerConfig) -> Iterator[str]:
    """Yield environments that do not exist or that no source uses."""
    named = {key: source.environment for key, source in config.data.sources.items()}
    for key, name in named.items():
        if name is not None and name not in config.environments:
            yield (
                f"{key}.environment is {name}, which is not in environments (there are "
                f"{', '.join(config.environments) or 'none'}): define environments.{name}, or "
                "correct the name."
            )
    for name in config.environments:
        if name not in named.values():
            yield f"environments.{name} is used by no data source: name it in one, or remove it."
    if config.environment is not None and config.environments and None not in named.values():
        yield "environment is set, but every data source names one of environments: remove it."


def _has_kl_term(config: TrainerConfig) -> bool:
    """Return True if the algorithm has a KL term against a reference policy."""
    # In task distill the teachers take the place of the reference, and other tasks have no KL term.
    return config.task == "rl" and (
        config.algorithm.kl_loss_coef > 0 or config.algorithm.kl_reward_coef > 0
    )


def _find_optional_role_conflicts(config: TrainerConfig) -> Iterator[str]:
    """Yield the roles critic and ref if they are missing, or set without an effect."""
    needs_critic = config.task == "rl" and config.algorithm.reads("values")
    needs_ref = (_has_kl_term(config) and config.algorithm.kl_reference == "ref") or (
        config.task == "dpo" and config.preference.reference == "ref"
    )
    if needs_critic != (config.critic is not None):
        users = " and ".join(list_estimators_with_input("values"))
        end = (
            f"critic is not set, but {users} need one in task rl: add critic=value_model."
            if needs_critic
            else f"critic is set, but only {users} need one, in task rl: set critic=none."
        )
        yield (
            f"algorithm.advantage is {config.algorithm.advantage.name} in task {config.task}, and "
            f"{end}"
        )
    if needs_ref == (config.ref is not None):
        return
    state = "set" if config.ref else "not set"
    if config.task == "sft":
        yield "ref is set in task sft, which has no reference policy: remove it (ref=none)."
    elif config.task == "dpo":
        yield (
            f"preference is {config.preference.name} with reference {config.preference.reference}, "
            f"and ref is {state}: reference ref needs the ref role (ref=frozen), and the others do "
            "not use it."
        )
    else:
        yield (
            f"algorithm.kl_loss_coef is {config.algorithm.kl_loss_coef}, algorithm.kl_reward_coef "
            f"is {config.algorithm.kl_reward_coef}, algorithm.kl_reference is "
            f"{config.algorithm.kl_reference}, and ref is {state}: a coefficient above 0 needs the "
            "ref role (or kl_reference=disabled_adapter), and the ref role needs such a "
            "coefficient."
        )


def _find_role_conflicts(config: TrainerConfig) -> Iterator[str]:
    """Yield layouts that do not fit the number of workers, and models of the wrong type."""
    is_ray = config.runtime.kind == "ray"
    for name, role in config.roles.items():
        yield from find_layout_conflicts(
            name, role.engine, num_workers=role.num_workers, is_ray=is_ray
        )
        actor_type = "reward_model" if config.task == "rm" else "language_model"
        yield from find_model_conflicts(
            name,
            role.engine,
            model_type="value_model" if name == "critic" else actor_type,
            purpose=f" in task {config.task}",
        )
    if config.ref is not None and config.ref.engine.optimizer is not None:
        yield (
            "ref.engine.optimizer is set, but the reference policy is frozen: set "
            "ref.engine.optimizer to null."
        )


def _find_adapter_conflicts(config: TrainerConfig) -> Iterator[str]:
    """Yield conflicts of LoRA adapters that have no effect or would be applied twice."""
    references = {
        "algorithm.kl_reference": config.algorithm.kl_reference,
        "preference.reference": config.preference.reference if config.task == "dpo" else None,
    }
    for key, reference in references.items():
        if reference == "disabled_adapter" and not config.actor.engine.lora.is_enabled:
            yield (
                f"{key} is disabled_adapter, but the actor has no adapter: set "
                f"actor.engine.lora.rank and actor.engine.lora.alpha, or set {key}=ref."
            )
    if config.algorithm.kl_reference == "disabled_adapter" and not _has_kl_term(config):
        yield (
            "algorithm.kl_reference is disabled_adapter, but algorithm.kl_loss_coef and "
            "algorithm.kl_reward_coef are 0: set one of them, or remove algorithm.kl_reference."
        )
    # An adapter of ref.engine.lora.path is loaded and stays as it is.
    if config.ref is not None and config.ref.engine.lora.rank > 0:
        yield (
            f"ref.engine.lora.rank is {config.ref.engine.lora.rank}, but the reference policy is "
            "frozen: set it to 0."
        )
    if config.warm_start is not None and config.actor.engine.lora.path is not None:
        yield (
            "warm_start and actor.engine.lora.path are both set: the warm start merges that "
            "adapter into the model, and RL would apply it again. Remove one of them."
        )


def _find_size_conflicts(config: TrainerConfig) -> Iterator[str]:
    """Yield lengths that exceed a limit.

    For sft, dpo and rm only the prompt limit is known before the data is read.
    """
    prompt, batching = config.data.max_prompt_tokens, config.batching
    key = "actor.engine.model.architecture.max_position_embeddings"
    positions = config.actor.engine.model.architecture.get("max_position_embeddings")
    caps = {key: positions} if isinstance(positions, int) else {}
    # The length of demonstrations and pairs is only known once they are tokenized.
    if config.task in SUPERVISED_TASKS:
        for cap in caps.values():
            if prompt > cap:
                yield (
                    f"{key} is {cap}, but data.max_prompt_tokens is {prompt}: raise the first or "
                    "lower the other."
                )
        return
    trained = "the turns of environment" if config.all_environments else "sampling.max_tokens"
    lengths = {trained: config.max_completion_tokens}
    if config.data.eval_sources:
        longest = config.compute_max_rollout_tokens(config.run.eval_sampling.max_tokens)
        lengths["run.eval_sampling.max_tokens"] = longest
    for name, length in lengths.items():
        # Evaluations are not batched.
        batches = {"batching.max_tokens": batching.max_tokens} if name == trained else {}
        for limit, cap in (batches | caps).items():
            if prompt + length > cap:
                yield (
                    f"{limit} is {cap}, but data.max_prompt_tokens ({prompt}) and {name} "
                    f"({length}) allow samples of {prompt + length} tokens: raise the first or "
                    "lower one of the others."
                )


def _find_task_conflicts(config: TrainerConfig) -> Iterator[str]:
    """Yield settings that the task needs but are missing, or that it does not use."""
    yield from find_distillation_conflicts(
        config.distillation,
        task=config.task,
        teachers=config.teachers,
        algorithm=config.algorithm,
        train_sources=config.data.train_sources,
        prompts_per_step=config.batching.prompts_per_step,
        has_environment=bool(config.all_environments),
        has_legacy_workers=config.use_legacy_worker_impl == "enable",
    )
    if config.preference_kind == "labels" and config.batching.prompts_per_step == 1:
        yield (
            "batching.prompts_per_step is 1, but preference kto estimates a KL divergence from the "
            "completions of other prompts in the same update: set it to 2 or more."
        )
    if config.warm_start is not None and config.task not in RL_TASKS:
        yield f"warm_start has no effect in task {config.task}: set warm_start=null."
    if config.task in PREFERENCE_TASKS:
        for key, source in config.data.sources.items():
            if isinstance(source, ArithmeticSource):
                yield (
                    f"{key} is arithmetic, which has no preferences for task {config.task}: use a "
                    f"source of files{'' if key == 'data.train' else f', or set {key}=null'}."
                )
    if (
        config.task in INFERENCE_TASKS
        and config.rollout.sampler == "vllm"
        and config.actor.engine.model.path is None
    ):
        yield (
            f"rollout.sampler is vllm in task {config.task}, but actor.engine.model.path is not "
            "set, so the servers have no weights to load: set it to a model directory."
        )
    if config.task == "generate":
        name = os.path.normpath(config.generate.file)
        if config.rollout.record and name == RECORD_FILE:
            yield (
                f"rollout.record and generate.file both write {RECORD_FILE}: set generate.file to "
                "another name."
            )
        if name in RESERVED_NAMES:
            yield (
                f"generate.file is {config.generate.file}, but the run itself writes there: set it "
                "to another name."
            )
    if config.algorithm.reads("components"):
        yield from find_component_conflicts(
            config.reward,
            estimator=config.algorithm.advantage.name,
            train_sources=config.data.train_sources,
        )
    yield from find_data_conflicts(
        config.data,
        task=config.task,
        tokens_per_update=config.batching.tokens_per_update,
        total_epochs=config.run.total_epochs,
    )
    yield from find_teacher_conflicts(
        config.teachers,
        pools=_name_pools(config),
        is_ray=config.runtime.kind == "ray",
        temperature=config.sampling.temperature,
        has_route_key=all(
            source.route_key is not None for source in config.data.train_sources.values()
        ),
    )


def _name_pools(config: TrainerConfig) -> dict[str, str]:
    """Return the key that names each resource pool, for all roles but the teachers."""
    # Roles may share a pool; one of their keys is enough for the message.
    pools = {role.pool: f"{name}.pool" for name, role in config.roles.items()}
    pools[config.rollout.pool] = "rollout.pool"
    if config.reward.model is not None:
        pools[config.reward.model.pool] = "reward.model.pool"
    return pools
