"""Settings of sampling: the sampler, vLLM servers, weight sync and asynchrony."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields
from typing import Annotated, Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.settings.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    UnitFloat,
)
from temper_trainer.settings.variants import settings

_REPLACED_ENGINE_KWARGS = {
    "model": "actor.engine.model",
    "tokenizer": "data.tokenizer",
    "dtype": "rollout.dtype",
    "max_num_seqs": "rollout.max_concurrent",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_bytes",
    "enable_sleep_mode": "rollout.vllm.sleep_level",
    "enable_lora": "weight_sync.content=adapter",
    "max_lora_rank": "actor.engine.lora.rank",
    "logprobs_mode": "sampling.temperature, which decides it",
    "weight_transfer_config": "weight_sync.transport",
    "worker_extension_cls": "weight_sync.transport",
    "seed": "run.seed: every request carries its own",
    "trust_remote_code": "actor.engine.model.trust_remote_code",
}
"""vLLM arguments that belong to a configuration key with a different name, and that key."""

RECORD_FILE = "completions.jsonl"
"""Name of the record of completions in the run folder; see `RolloutConfig.record`."""


@settings
class VllmConfig:
    """One vLLM server; see also rollout.num_replicas and rollout.max_concurrent (max_num_seqs)."""

    tensor_parallel_size: PositiveInt = 1
    """GPUs (or CPU processes) per replica. With ray, a replica in the pool of the actor shares the
    GPUs of that many ranks.
    """
    gpu_memory_utilization: Annotated[float, Range(above=0, at_most=1)] | None = None
    """Fraction of GPU memory for weights and KV cache, in (0, 1]; None is vLLM's default. Not
    allowed with kv_cache_bytes.
    """
    kv_cache_bytes: Annotated[int, Range(at_least=1 << 20)] | None = None
    """Size of the KV cache in bytes; None derives it from gpu_memory_utilization, which needs a
    GPU.
    """
    max_model_len: Annotated[int, Range(at_least=2)] | None = None
    """Maximum sequence length in tokens; None is the longest that data and sampling allow."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of tokens per scheduler step; None is vLLM's default."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation; the CPU build always does."""
    enable_chunked_prefill: bool | None = None
    """Process long prompts in chunks between decoding steps; None is vLLM's default."""
    enable_prefix_caching: bool = True
    """Compute common prefixes only once; the cache is cleared after every weight sync."""
    load_format: str = "dummy"
    """Initial weights of a server: dummy (random, replaced by the first weight sync), or one of
    vLLM's formats such as auto, which reads actor.engine.model.path.
    """
    sleep_level: Annotated[int, Range(at_least=0, at_most=2)] = 0
    """Memory that a server frees while the actor trains. 0: none; 1: the KV cache, with weights
    moved to host memory; 2: cache and weights. Needs CUDA.
    """
    engine_kwargs: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """More arguments of vLLM's ``EngineArgs``; a string that starts with { or [ is parsed as JSON.
    """
    servers: tuple[str, ...] = ()
    """Addresses ``HOST:PORT`` of servers that run already, in place of starting some. Needs the
    environment variable TEMPER_SERVER_TOKEN, with at least 16 characters.
    """
    servers_file: str | None = None
    """File with such addresses, one per line. It is read again every few seconds, and a server
    joins or leaves the run when its line is added or removed.
    """
    start_timeout_s: PositiveFloat = 600.0
    """Maximum time in seconds for the start of a server, and for another one to join if all have
    left.
    """
    stall_timeout_s: PositiveFloat = 120.0
    """Restart a server with open requests if neither a token nor a heartbeat arrives within this
    many seconds. A server sends no heartbeat while it samples, so this also limits one scheduler
    step.
    """
    load_timeout_s: PositiveFloat = 600.0
    """Restart a server whose heartbeat continues if loading weights, or any call without new
    tokens, takes longer than this many seconds.
    """
    max_restarts: NonNegativeInt = 3
    """Maximum number of server restarts in a run; after that the run stops."""

    def __post_init__(self) -> None:
        key = "rollout.vllm"
        for one, other in (
            ("gpu_memory_utilization", "kv_cache_bytes"),
            ("servers", "servers_file"),
        ):
            if getattr(self, one) and getattr(self, other) is not None:
                raise ConfigError(
                    f"{key}.{one} has no effect with {key}.{other}: remove one of them."
                )
        if wrong := [each for each in self.servers if not is_address(each)]:
            raise ConfigError(
                f"{key}.servers has {wrong[0]!r}, but must have addresses HOST:PORT, such as "
                "10.0.0.5:8100."
            )
        if len(set(map(normalize_address, self.servers))) < len(self.servers):
            raise ConfigError(
                f"{key}.servers is {list(self.servers)}, but a server can be connected once: "
                "remove the repeated address."
            )
        # Each setting has one key. Otherwise config.yaml might show a value that is not used.
        reserved = {each.name: f"{key}.{each.name}" for each in fields(self)}
        for name in self.engine_kwargs:
            if replacement := (reserved | _REPLACED_ENGINE_KWARGS).get(name):
                raise ConfigError(
                    f"{key}.engine_kwargs.{name} cannot be set here: set {replacement} instead."
                )

    @property
    def has_remote_servers(self) -> bool:
        """True if the run connects to servers in place of starting some."""
        return bool(self.servers) or self.servers_file is not None


def is_address(text: str) -> bool:
    """Return True if a text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def normalize_address(address: str) -> str:
    """Return the form of an address in which equal servers on this host are equal.

    Example:
        >>> normalize_address("localhost:8100")
        '127.0.0.1:8100'
    """
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host == "localhost" else address


@settings
class SamplingConfig:
    """Sampling parameters of training rollouts; run.eval_sampling has the same for evaluation."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 is greedy. Training needs it above 0, and log-probs use the same
    temperature.
    """
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Sample from the smallest set of tokens with at least this total probability, in (0, 1]."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0 uses all."""
    max_tokens: PositiveInt = 512
    """Maximum completion length in tokens, the end token included."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion in addition to the end token; they stay part of it."""

    @property
    def greedy_cause(self) -> str:
        """The setting, with its value, that makes all completions of a prompt equal, or empty."""
        if self.temperature == 0:
            return "temperature is 0 (greedy)"
        return "top_k is 1 (greedy)" if self.top_k == 1 else ""

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ConfigError(
                f"stop is {list(self.stop)}, but an empty string would end every completion "
                "immediately: remove it."
            )


@settings
class RolloutConfig:
    """The sampler of the run."""

    sampler: Literal["hf", "vllm"] = "hf"
    """hf: continuous batching with transformers, runs on any device; vllm: servers in separate
    processes.
    """
    num_replicas: PositiveInt = 1
    """Number of servers that requests are balanced over; more than 1 needs sampler vllm."""
    max_concurrent: PositiveInt = 256
    """Maximum number of sequences that one replica decodes at the same time."""
    dtype: Literal["bf16", "fp32"] = "fp32"
    """Data type of the sampler's weights."""
    max_failure_fraction: UnitFloat = 0.0
    """Stop the run if the sampler refuses a larger fraction of a step's requests; up to it, their
    rollouts are counted and left out. In [0, 1]; 0 stops at the first. Rollouts with an environment
    count in environment.max_failure_fraction instead.
    """
    pool: str = "train"
    """ray only: resource pool of the sampler; the pool of the roles colocates it with them."""
    canary: bool = True
    """After each weight sync, compare the log-probs of a prompt between engine and sampler."""
    canary_tolerance: PositiveFloat | None = None
    """Maximum difference of a log-prob, in nats. None accepts 0.05, or 0.3 if the sampler or the
    actor computes in bf16, or 2.0 if the actor multiplies in float8.
    """
    record: bool = False
    """Write every completion to completions.jsonl in the run folder, for rollout.replay."""
    replay: str | None = None
    """completions.jsonl of a run with the same configuration; its completions are trained instead
    of sampled ones.
    """
    routing_replay: Literal["none", "sampler", "old_policy"] = "none"
    """Mixtures of experts: choices that decide the experts of each token in the actor. sampler:
    those of the sampler, in the pass for old log-probs and in training (R3; Ma et al. 2025,
    arXiv:2510.11370). old_policy: those of the pass for old log-probs, in training (R2; routing
    replay of Zheng et al. 2025, arXiv:2507.18071). none: the actor's routers choose. sampler with
    rollout.sampler hf only for models without layers that have a state.
    """
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """Settings of the servers; sampler vllm only."""

    def __post_init__(self) -> None:
        if self.sampler == "hf" and self.num_replicas > 1:
            raise ConfigError(
                f"rollout.num_replicas is {self.num_replicas}, but rollout.sampler hf runs in one "
                "process: use rollout=vllm."
            )

    def resolve_canary_tolerance(self, actor: EngineConfig) -> float:
        """Return the canary's tolerance in nats for the engine of the actor."""
        if self.canary_tolerance is not None:
            return self.canary_tolerance
        # Both of our engines have this setting; others need not have it.
        if getattr(actor, "float8", "none") != "none":
            # A correct 0.4B model differed by up to 0.97 from bf16 in 150 steps on an H200.
            return 2.0
        # Two correct bf16 implementations of a 0.4B model differed by 0.06 on an H100, and one
        # by 0.12 from float32. Wrong weights differ by 1 and more.
        computes = (self.dtype, actor.precision.compute)
        return 0.05 if computes == ("fp32", "fp32") else 0.3


TransportName = Literal[
    "auto", "in_process", "object_store", "shared_memory", "cuda_ipc", "collective"
]


@settings
class WeightSyncConfig:
    """Settings for sending the actor's weights to the sampler."""

    transport: TransportName = "auto"
    """auto chooses. Sampler hf: in_process (runtime inline) or object_store (runtime ray). Sampler
    vllm: cuda_ipc from each rank to the servers on its GPU, collective (NCCL) to other GPUs,
    shared_memory between CPUs of one host, collective (gloo) across hosts. In loops that sample
    ahead, only shared_memory can restart the only server.
    """
    content: Literal["full", "adapter", "delta"] = "full"
    """full: all weights, an adapter merged; adapter: only the LoRA adapter; delta: the elements
    that changed since the last sync, after a first full one. full and delta give the sampler
    bitwise equal weights.
    """
    max_changed_fraction: UnitFloat = 0.25
    """content delta only: send a tensor in full if a larger fraction of its elements changed, in
    [0, 1].
    """
    bucket_bytes: Annotated[int, Range(at_least=1 << 10)] = 256 << 20
    """Maximum size of a transfer bucket in bytes; a larger tensor gets its own bucket."""
    checksum: bool = True
    """Verify a checksum for every bucket after its transfer."""


@settings
class AsynchronyConfig:
    """Settings of loop async; one_step_off always has a staleness of 1."""

    max_staleness: PositiveInt = 1
    """Maximum number of weight updates between a completion's first token and the step that trains
    on it.
    """
    partial_rollouts: bool = True
    """Pause unfinished completions at a weight sync and continue them with the new weights,
    recording the version of each token. False waits for them to finish.
    """


def find_rollout_conflicts(
    rollout: RolloutConfig,
    *,
    sync: WeightSyncConfig,
    sampling: SamplingConfig,
    loop: str,
    kind: str,
    devices: Sequence[str],
    bind_address: str | None,
    has_adapter: bool,
    actor_device: str,
) -> Iterator[str]:
    """Yield transports, weight contents and log-probs that the sampler does not support.

    Args:
        rollout: The sampler.
        sync: Settings for sending it weights.
        sampling: Its parameters for training rollouts.
        loop: Value of loop.
        kind: Value of runtime.kind.
        devices: Value of runtime.rollout_devices.
        bind_address: Value of runtime.bind_address; None if the task sends no weights.
        has_adapter: True if the actor has a LoRA adapter.
        actor_device: Value of actor.engine.device.
    """
    sampler = rollout.sampler
    fitting = {
        "vllm": ["shared_memory", "cuda_ipc", "collective"],
        # The hf sampler is in the driver's process or in a Ray actor, never behind a server.
        "hf": ["in_process" if kind == "inline" else "object_store"],
    }[sampler]
    if sync.transport not in ("auto", *fitting):
        yield (
            f"weight_sync.transport is {sync.transport}, but with rollout.sampler {sampler} and "
            f"runtime.kind {kind} it must be auto or {' or '.join(fitting)}."
        )
    if sync.transport == "cuda_ipc" and actor_device == "cpu":
        yield (
            "weight_sync.transport is cuda_ipc, but actor.engine.device is cpu: use auto, or train "
            "on cuda."
        )
    if sync.content == "adapter":
        yield from _find_adapter_conflicts(rollout, sync=sync, has_adapter=has_adapter)
    if rollout.vllm.has_remote_servers:
        yield from _find_remote_conflicts(rollout, sync=sync, devices=devices)
        # With Ray, the rank that sends weights listens on the address of its node.
        distant = [each for each in rollout.vllm.servers if not _is_loopback(each)]
        if kind == "inline" and distant and bind_address and _is_loopback(bind_address):
            yield (
                f"runtime.bind_address is {bind_address}, which rollout.vllm.servers on other "
                f"hosts, such as {distant[0]}, cannot reach: set runtime.bind_address to an "
                "address of this host that they can reach."
            )
    elif devices and len(devices) != rollout.num_replicas:
        yield (
            f"runtime.rollout_devices has {len(devices)} entries, but rollout.num_replicas is "
            f"{rollout.num_replicas}: give one entry per replica."
        )
    if rollout.vllm.sleep_level and loop != "sync":
        yield (
            f"rollout.vllm.sleep_level is {rollout.vllm.sleep_level}, but loop is "
            f"{loop}, in which servers sample while the actor trains: set it to 0, or use "
            "loop=sync."
        )
    is_truncated = sampling.top_p < 1 or sampling.top_k > 0
    if sampler == "vllm" and sampling.temperature != 1 and is_truncated:
        yield (
            f"sampling.temperature is {sampling.temperature} together with sampling.top_p "
            f"{sampling.top_p} and sampling.top_k {sampling.top_k}: training needs log-probs "
            "after temperature and before truncation, which vLLM does not report. Use temperature "
            "1, or top_p 1 and top_k 0, or rollout=hf."
        )


def _find_adapter_conflicts(
    rollout: RolloutConfig, *, sync: WeightSyncConfig, has_adapter: bool
) -> Iterator[str]:
    """Yield settings that prevent the sync of an adapter alone."""
    if rollout.sampler != "vllm" or not has_adapter:
        yield (
            f"weight_sync.content is adapter, but rollout.sampler is {rollout.sampler} "
            f"and actor.engine.lora is {'on' if has_adapter else 'off'}: it needs rollout=vllm and "
            "an adapter; full sends an adapter merged."
        )
    if sync.transport not in ("auto", "shared_memory"):
        yield (
            f"weight_sync.transport is {sync.transport}, but weight_sync.content adapter is sent "
            "as a file: use auto."
        )
    if rollout.vllm.sleep_level == 2:
        yield (
            "rollout.vllm.sleep_level is 2, which drops the base weights, but weight_sync.content "
            "is adapter, which never sends them again: use sleep_level 1 or content full."
        )


def _is_loopback(address: str) -> bool:
    """Return True if an address, with or without a port, is that of the host itself."""
    return address.startswith(("127.", "localhost:"))


def _find_remote_conflicts(
    rollout: RolloutConfig, *, sync: WeightSyncConfig, devices: Sequence[str]
) -> Iterator[str]:
    """Yield settings that have no effect on servers that the run does not start."""
    key = "rollout.vllm.servers" if rollout.vllm.servers else "rollout.vllm.servers_file"
    if rollout.sampler != "vllm":
        yield f"{key} is set, but rollout.sampler is {rollout.sampler}: use rollout=vllm."
    started = {
        "rollout.num_replicas": rollout.num_replicas != 1,
        "runtime.rollout_devices": devices,
    }
    for setting in (name for name, is_set in started.items() if is_set):
        yield f"{setting} has no effect with {key}, where the run starts no servers: remove it."
    if sync.content == "adapter":
        yield (
            f"weight_sync.content is adapter, which is sent as a file, but with {key} servers may "
            "be on other hosts: use full or delta."
        )
