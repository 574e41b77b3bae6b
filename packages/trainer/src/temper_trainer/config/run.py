"""The whole configuration of a run, and the parts of it that concern the run itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig, OptimizerSpec, ScheduleSpec
from temper_trainer.config.algorithm import AlgorithmConfig, BatchingConfig
from temper_trainer.config.asynchrony import AsynchronyConfig
from temper_trainer.config.data import DataConfig, RewardConfig, SourceConfig
from temper_trainer.config.distillation import DistillationConfig, TeacherConfig
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.generate import GenerateConfig
from temper_trainer.config.preference import PreferenceConfig
from temper_trainer.config.ranges import LOOPBACK, check_listen_address, check_range
from temper_trainer.config.reward_model import reward_model_problems
from temper_trainer.config.rollout import RolloutConfig, SamplingConfig
from temper_trainer.config.tasks import task_problems
from temper_trainer.config.weight_sync import WeightSyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Length, place and habits of a run."""

    dir: str = "runs/default"
    """Run folder: metrics, picture, resolved config, checkpoints, model. An existing run is never overwritten."""
    seed: int = 0
    """Of data order, sampling and everything random but the model's first weights."""
    total_steps: int = 100
    """RL steps, or SFT updates."""
    total_epochs: int | None = None
    """Passes over the training problems, in place of total_steps: as many whole steps as each holds, counted when they have been read."""
    resume: str = "never"
    """never refuses a folder that holds a run. auto continues from the newest good checkpoint:
    damaged ones are renamed, never deleted. Or the path of a step directory, whose later steps in
    the same run are renamed, or of what an old run was converted to."""
    save_every: int = 0
    """Steps between checkpoints, in addition to save_interval_s; 0 does not count steps. The end of a run always saves."""
    save_interval_s: float | None = 900.0
    """Seconds between checkpoints: the first step that ends later saves. None saves by save_every alone, and at the end."""
    stop_grace_s: float = 60.0
    """Longest time from SIGINT or SIGTERM to the end of the process. A step that does not end within the first half is abandoned while it
    samples, and the one before it is saved; set it below the time after which a scheduler sends SIGKILL."""
    save_in_background: bool = False
    """Let a step wait only until its state is copied to host memory, and write it while the next ones run; the last save of a run is
    waited for. One save is under way at most."""
    max_ckpt_to_keep: int | None = 2
    """Newest verified checkpoints to keep; older ones that this run wrote are deleted. None keeps
    all."""
    keep_every: int = 0
    """Checkpoints of steps that are a multiple of this are permanent: they are kept in addition to
    max_ckpt_to_keep. 0 makes none permanent."""
    verify_checkpoints: Literal["full", "size"] = "full"
    """How files are compared with the manifest before a checkpoint is resumed from, and before
    older ones are deleted. full reads every file and compares its checksum; size reads no file."""
    save_model: bool = True
    """Write a Hugging Face model directory at the end."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    eval_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """Greedy by default; max_tokens is taken from here too."""
    eval_sampled: bool = False
    """Evaluate also with the training's sampling."""
    num_table_rows: int = 4
    """Completions shown in the table of samples."""
    table_every: int = 20
    """Steps between tables; 0 shows none."""
    num_threads: int | None = None
    """CPU threads of torch in each process; None is torch's own choice."""
    progress: bool = True
    """Progress bars, where the output is a terminal."""
    trackers: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "trackio"], ...] = (
        "jsonl",
        "tensorboard",
    )
    """Where metrics go; mlflow and trackio need jsonl beside them, from which they take earlier steps after a resume."""
    prometheus_port: int | None = None
    """Serve the newest value of every metric to Prometheus on this port while the run lasts; None serves nothing. Scrapes need the token in
    RUN.DIR/prometheus_token."""
    prometheus_address: str = LOOPBACK
    """IP address of the driver's machine on which that port is opened."""

    def __post_init__(self) -> None:
        if "://" in self.dir:
            raise ConfigError(
                f"run.dir is {self.dir!r}, a URL: give a folder that every node sees, and copy it when the run is done."
            )
        check_range("run.seed", self.seed, at_least=0)
        check_range("run.total_steps", self.total_steps, at_least=1)
        check_range("run.total_epochs", self.total_epochs, at_least=1)
        check_range("run.save_every", self.save_every, at_least=0)
        check_range("run.save_interval_s", self.save_interval_s, above=0)
        check_range("run.stop_grace_s", self.stop_grace_s, above=0)
        if self.save_in_background and self.save_every == 0 and self.save_interval_s is None:
            raise ConfigError(
                "run.save_in_background is on, but run.save_every is 0 and run.save_interval_s is null, so that the only save is the last "
                "one, which is always waited for: set one of them, or turn run.save_in_background off."
            )
        check_range("run.max_ckpt_to_keep", self.max_ckpt_to_keep, at_least=1)
        check_range("run.keep_every", self.keep_every, at_least=0)
        if self.keep_every and self.max_ckpt_to_keep is None:
            raise ConfigError(
                f"run.keep_every is {self.keep_every}, but run.max_ckpt_to_keep is null, which keeps all "
                "checkpoints: set run.max_ckpt_to_keep, or leave run.keep_every out."
            )
        check_range("run.eval_every", self.eval_every, at_least=0)
        check_range("run.num_table_rows", self.num_table_rows, at_least=0)
        check_range("run.table_every", self.table_every, at_least=0)
        check_range("run.num_threads", self.num_threads, at_least=1)
        check_range("run.prometheus_port", self.prometheus_port, at_least=1, at_most=65535)
        check_listen_address("run.prometheus_address", self.prometheus_address, may_be_any=True)
        for name in ("mlflow", "trackio"):
            if name in self.trackers and "jsonl" not in self.trackers:
                raise ConfigError(
                    f"run.trackers names {name} without jsonl, from which it takes earlier steps after a resume: add jsonl."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """One model of a run: its engine, and the resources it runs on."""

    engine: EngineConfig
    """Of the class that ``model_engine`` names."""
    num_workers: int = 1
    """Processes of the role; more than 1 needs the ray runtime."""
    pool: str = "train"
    """Resource pool; roles of one pool share its devices."""

    def __post_init__(self) -> None:
        check_range("num_workers", self.num_workers, at_least=1)
        check_range("engine.collective_timeout_s", self.engine.collective_timeout_s, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Where the roles run."""

    kind: Literal["inline", "ray"] = "inline"
    """inline: all in the driver's process; ray: actors and placement groups."""
    cpus_per_worker: float = 1.0
    """ray only."""
    gpus_per_worker: float = 0.0
    """ray only; colocated roles of one pool share it."""
    address: str | None = None
    """ray only: an existing cluster; None starts one on this machine."""
    bind_address: str = LOOPBACK
    """IP address of this machine at which the run's own listeners, and a Ray that the run starts, can be reached. Nodes of an existing
    cluster listen on the address that they were started with (``ray start --node-ip-address``)."""
    rollout_python: str | None = None
    """sampler vllm only: the Python interpreter of the servers, such as that of a virtual environment with vLLM, temper-engine-api and
    temper-trainer in it; None is the trainer's own."""
    rollout_devices: tuple[str, ...] = ()
    """runtime inline and sampler vllm only: CUDA_VISIBLE_DEVICES of each replica in order, such as ["1", "2,3"]; empty gives every server
    the driver's own devices."""
    worker_timeout_s: float = 1800.0
    """ray only: longest wait for a worker before the run stops and says which."""
    watchdog_s: float | None = 300.0
    """Waits longer than this are told, with who has not answered, once per interval; None tells nothing."""

    def __post_init__(self) -> None:
        check_listen_address("runtime.bind_address", self.bind_address)
        if self.address is not None and self.bind_address != LOOPBACK:
            raise ConfigError(
                f"runtime.bind_address is {self.bind_address}, but runtime.address names an existing "
                "cluster, whose nodes listen on their own addresses: remove runtime.bind_address, and "
                "start the nodes with ray start --node-ip-address."
            )
        check_range("runtime.cpus_per_worker", self.cpus_per_worker, above=0)
        check_range("runtime.gpus_per_worker", self.gpus_per_worker, at_least=0)
        check_range("runtime.worker_timeout_s", self.worker_timeout_s, above=0)
        check_range("runtime.watchdog_s", self.watchdog_s, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """The warm start: supervised fine-tuning before RL. Task sft takes its settings from data, batching, run and the actor."""

    data: SourceConfig | None = None
    """Demonstrations; None takes data.train."""
    total_steps: int = 100
    """Updates."""
    batch_size: int = 64
    """Demonstrations of one update."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """Of the warm start; the actor's own begins anew after it."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """Of the warm start."""

    def __post_init__(self) -> None:
        check_range("warm_start.total_steps", self.total_steps, at_least=1)
        check_range("warm_start.batch_size", self.batch_size, at_least=1)


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
    warm_start: SftConfig | None = None
    """A short SFT before RL; None begins from the actor's model as it is."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """Processes."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, place and habits."""

    def __post_init__(self) -> None:
        if problems := _conflicts(self):
            raise ConfigError("\n".join(problems))

    @property
    def longest_completion(self) -> int:
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
    if is_disabled_adapter and not config.actor.engine.lora.is_on:
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
    if sync.content == "adapter" and (sampler != "vllm" or not config.actor.engine.lora.is_on):
        found.append(
            f"weight_sync.content is adapter, but rollout.sampler is {sampler} and actor.engine.lora is "
            f"{'on' if config.actor.engine.lora.is_on else 'off'}: it needs rollout=vllm and an adapter; full sends an adapter merged."
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
    completion = {name: config.longest_completion}
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
