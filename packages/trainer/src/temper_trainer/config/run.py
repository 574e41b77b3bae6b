"""Settings of the run itself and of the processes it runs in."""

from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.ranges import LOOPBACK, check_listen_address, check_range
from temper_trainer.config.rollout import SamplingConfig


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


LEGACY_WORKER_GROUP = "temper.legacy_workers"
"""Entry-point group that temper-legacy-shim fills."""


LEGACY_TRAINING_WORKER = "training_worker"
"""The entry point that is a ``TrainingWorker`` around them."""


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
