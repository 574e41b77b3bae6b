"""Settings for the run, its roles and the processes that they run in."""

from collections.abc import Iterator
from dataclasses import field
from ipaddress import IPv4Address
from typing import Annotated, Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.settings.ranges import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    check_pattern,
)
from temper_trainer.settings.variants import settings

LOOPBACK = "127.0.0.1"
"""Reachable only from processes on the same host."""


def check_listen_address(key: str, value: str, *, may_be_any: bool = False) -> None:
    """Raise unless a value is an IPv4 address that the run may listen on.

    Args:
        key: Dotted key, for the message.
        value: IPv4 address.
        may_be_any: True to allow 0.0.0.0, all addresses of the host.

    Raises:
        ConfigError: If it is not an IPv4 address, or is 0.0.0.0 where that is not allowed.
    """
    try:
        address = IPv4Address(value)
    except ValueError as error:
        raise ConfigError(
            f"{key} is {value!r}, but must be an IPv4 address of this host, such as {LOOPBACK}."
        ) from error
    if address.is_unspecified and not may_be_any:
        raise ConfigError(
            f"{key} is {value}, which opens every port on all networks of this host: give the "
            f"address at which other hosts reach it, or keep {LOOPBACK}."
        )


@settings
class RunConfig:
    """Run length, output directory, checkpointing, evaluation and logging."""

    dir: str = "runs/default"
    """Run folder for metrics, plots, the resolved configuration, checkpoints and the model. An
    existing run is never overwritten.
    """
    seed: NonNegativeInt = 0
    """Seed of data order, sampling and all other randomness except the initial weights."""
    total_steps: PositiveInt = 100
    """Number of RL steps, or of updates in tasks sft, dpo and rm."""
    total_epochs: PositiveInt | None = None
    """Passes over the training data; replaces total_steps. Each pass has as many full steps as the
    data fills.
    """
    resume: str = "never"
    """never: refuse a folder that contains a run. auto: continue from the newest valid checkpoint;
    damaged ones are renamed, and the newest two of them are kept. Or the path of a step directory
    (later steps of the same run are renamed) or of a converted checkpoint.
    """
    save_every: NonNegativeInt = 0
    """Steps between checkpoints, in addition to save_interval_s; 0 is off. The end of a run always
    saves.
    """
    save_interval_s: PositiveFloat | None = 900.0
    """Seconds between checkpoints, taken after the next complete step; None is off."""
    stop_grace_s: PositiveFloat = 60.0
    """Maximum time in seconds from SIGINT or SIGTERM to the end of the process. A step still
    sampling after half of it is abandoned, and the state after the previous step is saved. Set it
    below the time after which your scheduler sends SIGKILL.
    """
    save_in_background: bool = False
    """Copy the state to host memory and write it while the next steps run. Only one save is in
    progress at a time, and the run waits for the last one.
    """
    max_ckpt_to_keep: PositiveInt | None = 2
    """Number of newest verified checkpoints to keep; older ones of this run are deleted. None keeps
    all.
    """
    keep_every: NonNegativeInt = 0
    """Keep checkpoints of steps that are a multiple of this, in addition to max_ckpt_to_keep; 0 is
    off.
    """
    verify_checkpoints: Literal["full", "size"] = "full"
    """Verification of a checkpoint before resuming from it and before deleting older ones. full:
    checksums of all files; size: file sizes only.
    """
    save_model: bool = True
    """Write a Hugging Face model directory at the end."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out data; 0 evaluates only before the first and after the
    last step.
    """
    eval_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """Sampling parameters of evaluation, greedy by default."""
    eval_sampled: bool = False
    """Evaluate additionally with the sampling parameters of training."""
    eval_num_completions: PositiveInt = 1
    """Completions per problem of evaluations with a temperature above 0; more than 1 also measures
    pass@k and maj@k. Greedy evaluations always take one.
    """
    eval_solved_reward: FiniteFloat = 1.0
    """A completion is right for pass@k and maj@k if its reward is at least this."""
    eval_answer_pattern: str | None = None
    """Regular expression of a completion's answer for maj@k: its last match, or the first group of
    that. None takes the answer of a built-in reward.function; other functions have no maj@k.
    """
    num_table_rows: NonNegativeInt = 4
    """Number of completions in the printed table of samples."""
    table_every: NonNegativeInt = 20
    """Steps between printed tables of samples, which are also shown after the first and the last
    step; 0 prints none.
    """
    report: bool = True
    """Write curves.png and report.html after the first step, then at most once a minute, and at the
    end. `temper-train --report RUN_DIR` writes them at any time.
    """
    num_threads: Annotated[int, Range(at_least=1, at_most=1024)] | None = None
    """CPU threads of torch per process; None is torch's default."""
    progress: bool = True
    """Show progress bars if the output is a terminal."""
    trackers: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "trackio"], ...] = (
        "jsonl",
        "tensorboard",
    )
    """Destinations of metrics; mlflow and trackio also need jsonl, which provides the earlier steps
    after a resume.
    """
    prometheus_port: Annotated[int, Range(at_least=1, at_most=65535)] | None = None
    """Serve the latest value of every metric to Prometheus on this port during the run; None is
    off. Scrapes need the token in RUN.DIR/prometheus_token.
    """
    prometheus_address: str = LOOPBACK
    """IP address of the driver's host on which the port is opened."""

    def __post_init__(self) -> None:
        if not self.dir.strip():
            raise ConfigError(
                "run.dir is empty: name a folder, such as runs/mine. Is a shell variable unset?"
            )
        if "://" in self.dir:
            raise ConfigError(
                f"run.dir is {self.dir!r}, a URL: give a folder that all nodes can access, and "
                "copy it after the run."
            )
        check_pattern("run.eval_answer_pattern", self.eval_answer_pattern)
        check_listen_address("run.prometheus_address", self.prometheus_address, may_be_any=True)
        for name in ("mlflow", "trackio"):
            if name in self.trackers and "jsonl" not in self.trackers:
                raise ConfigError(
                    f"run.trackers has {name} but not jsonl, which provides the earlier steps "
                    "after a resume: add jsonl."
                )

    @property
    def resumes_from_path(self) -> bool:
        """True if `resume` names a checkpoint, which may be earlier than the newest one."""
        return self.resume not in ("never", "auto")


@settings
class RuntimeConfig:
    """Processes, resources and addresses."""

    kind: Literal["inline", "ray"] = "inline"
    """inline: all roles in the driver's process; ray: actors in placement groups."""
    cpus_per_worker: PositiveFloat = 1.0
    """ray only: CPUs per worker."""
    gpus_per_worker: NonNegativeFloat = 0.0
    """ray only: GPUs per worker; colocated roles share them."""
    address: str | None = None
    """ray only: address of an existing cluster; None starts one on this host."""
    bind_address: str = LOOPBACK
    """IP address of this host on which the run, and a Ray cluster it starts, listen. Nodes of an
    existing cluster listen on the address given to ``ray start --node-ip-address``.
    """
    rollout_python: str | None = None
    """sampler vllm only: Python interpreter of the servers, such as that of a virtual environment
    with vLLM, temper-engine-api and temper-trainer. None is the trainer's own.
    """
    rollout_devices: tuple[str, ...] = ()
    """runtime inline and sampler vllm only: CUDA_VISIBLE_DEVICES of each replica, in order, such as
    ["1", "2,3"]; empty gives every server the driver's devices.
    """
    worker_timeout_s: PositiveFloat = 1800.0
    """ray only: maximum time in seconds to wait for a worker before the run stops and names it."""
    watchdog_s: PositiveFloat | None = 300.0
    """Warn once per this many seconds while a wait lasts longer, naming who has not answered; None
    disables it.
    """

    def __post_init__(self) -> None:
        check_listen_address("runtime.bind_address", self.bind_address)


def describe_short_epoch(run: RunConfig, *, num_problems: int, prompts_per_step: int) -> str:
    """Return why a run of whole epochs is refused that would have less than a step in each."""
    return (
        f"run.total_epochs is {run.total_epochs}, but the data has {num_problems} problems, less "
        f"than a step of batching.prompts_per_step = {prompts_per_step}: lower it, or set "
        "run.total_steps."
    )


LEGACY_WORKER_GROUP = "temper.legacy_workers"
"""Entry-point group in which temper-legacy-shim registers the deprecated workers."""


LEGACY_TRAINING_WORKER = "training_worker"
"""Name of the entry point for a ``TrainingWorker`` that wraps the deprecated workers."""


RL_TASKS = ("rl", "distill")
"""Tasks that sample completions and train on them."""

PREFERENCE_TASKS = ("dpo", "rm")
"""Tasks that train on pairs or on labeled completions."""

SUPERVISED_TASKS = ("sft", *PREFERENCE_TASKS)
"""Tasks that train on given completions and sample none."""

INFERENCE_TASKS = ("eval", "generate")
"""Tasks that sample completions and train nothing."""


ROLES = ("actor", "critic", "ref")
"""Models of a run with their own settings, which are below these configuration keys."""


@settings
class RoleConfig:
    """One model of a run: its engine, and the resources it runs on."""

    engine: EngineConfig
    """Settings of the engine that model_engine names."""
    num_workers: PositiveInt = 1
    """Number of processes; more than 1 needs runtime.kind=ray."""
    pool: str = "train"
    """ray only: resource pool; roles with the same pool share its devices."""


def find_model_conflicts(
    key: str, engine: EngineConfig, *, model_type: str, purpose: str = "", is_frozen: bool = False
) -> Iterator[str]:
    """Yield settings of a model that do not fit its use.

    Args:
        key: Key of the model's block.
        engine: Its engine.
        model_type: Type that it must have.
        purpose: Reason for the type, which ends the message.
        is_frozen: True if it may not have an adapter.
    """
    if engine.model.model_type != model_type:
        yield (
            f"{key}.engine.model.model_type is {engine.model.model_type}, but must be "
            f"{model_type}{purpose}."
        )
    if is_frozen and engine.lora.is_enabled:
        yield (
            f"{key}.engine.lora is set, but this model is frozen: merge the adapter into it, and "
            "remove the adapter."
        )


def find_layout_conflicts(
    key: str, engine: EngineConfig, *, num_workers: int, is_ray: bool
) -> Iterator[str]:
    """Yield conflicts of a model's num_workers with the runtime and with its parallel layout."""
    if num_workers > 1 and not is_ray:
        yield (
            f"{key}.num_workers is {num_workers}, but runtime.kind is inline, which runs one "
            "process: use ray."
        )
    if num_workers % engine.replica_size:
        yield (
            f"{key}.num_workers is {num_workers}, but the layout of {key}.engine shards one copy "
            f"of the model over {engine.replica_size} ranks: set {key}.num_workers to a multiple "
            f"of {engine.replica_size}, or lower the sizes of the layout."
        )
    try:
        engine.check_num_ranks(num_workers)
    except ConfigError as error:
        yield f"{key}.engine and {key}.num_workers: {error}"
