"""Settings of sampling: the sampler, its servers, and how it receives weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.ranges import check_range

RESERVED_ENGINE_KWARGS = {
    "model": "actor.engine.model",
    "tokenizer": "data.tokenizer",
    "dtype": "rollout.dtype",
    "max_num_seqs": "rollout.max_concurrent",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_bytes",
    "max_model_len": "rollout.vllm.max_model_len",
    "max_num_batched_tokens": "rollout.vllm.max_num_batched_tokens",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "enable_chunked_prefill": "rollout.vllm.enable_chunked_prefill",
    "enable_prefix_caching": "rollout.vllm.enable_prefix_caching",
    "load_format": "rollout.vllm.load_format",
    "enable_sleep_mode": "rollout.vllm.sleep_level",
    "enable_lora": "weight_sync.content=adapter",
    "max_lora_rank": "actor.engine.lora.rank",
    "logprobs_mode": "sampling.temperature, which decides it",
    "weight_transfer_config": "weight_sync.transport",
    "worker_extension_cls": "weight_sync.transport",
    "seed": "run.seed: every request carries its own",
    "trust_remote_code": "actor.engine.model.trust_remote_code",
}
"""Arguments of vLLM that have a key of ours, which is the only place to set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """One vLLM server; rollout.num_replicas says how many there are, rollout.max_concurrent is its max_num_seqs."""

    tensor_parallel_size: int = 1
    """GPUs, or CPU processes, that share one replica."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that a server may take for weights and cache; None is vLLM's own. Ineffective with kv_cache_bytes."""
    kv_cache_bytes: int | None = None
    """Size of the cache of keys and values; None derives it from gpu_memory_utilization, and needs a GPU."""
    max_model_len: int | None = None
    """Longest sequence, in tokens; None is the longest that data and sampling allow."""
    max_num_batched_tokens: int | None = None
    """Tokens of one scheduler step; None is vLLM's own choice."""
    enforce_eager: bool = False
    """Without CUDA graphs and compilation; the CPU build is always eager."""
    enable_chunked_prefill: bool | None = None
    """Whether long prompts are computed in pieces between decoding steps; None is vLLM's own choice."""
    enable_prefix_caching: bool = True
    """Whether equal beginnings are computed once; the cache is emptied after every weight sync."""
    load_format: str = "dummy"
    """What a server starts with: dummy (random, replaced by the first weight sync), or one of vLLM's formats such as auto, which reads
    actor.engine.model.path."""
    sleep_level: int = 0
    """What a server gives back while the actor trains: 0 nothing, 1 the cache (weights move to host memory), 2 cache and weights. Needs
    CUDA."""
    engine_kwargs: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs``, by their names there; a text that begins with { or [ is read as JSON."""
    start_timeout_s: float = 600.0
    """Longest start of a server."""
    stall_timeout_s: float = 120.0
    """Longest time that a server with open calls may send neither a token nor the heartbeat of its
    process; then it is ended and started again."""
    load_timeout_s: float = 600.0
    """Longest time that loading weights, or any call without new tokens, may take in a server whose
    process still sends its heartbeat; then it is ended and started again."""
    max_restarts: int = 3
    """Times that a dead replica is started again, over the whole run, before the run stops."""

    def __post_init__(self) -> None:
        key = "rollout.vllm"
        check_range(f"{key}.tensor_parallel_size", self.tensor_parallel_size, at_least=1)
        check_range(
            f"{key}.gpu_memory_utilization", self.gpu_memory_utilization, above=0, at_most=1
        )
        check_range(f"{key}.kv_cache_bytes", self.kv_cache_bytes, at_least=1 << 20)
        check_range(f"{key}.max_model_len", self.max_model_len, at_least=2)
        check_range(f"{key}.max_num_batched_tokens", self.max_num_batched_tokens, at_least=1)
        check_range(f"{key}.sleep_level", self.sleep_level, at_least=0, at_most=2)
        check_range(f"{key}.start_timeout_s", self.start_timeout_s, above=0)
        check_range(f"{key}.stall_timeout_s", self.stall_timeout_s, above=0)
        check_range(f"{key}.load_timeout_s", self.load_timeout_s, above=0)
        check_range(f"{key}.max_restarts", self.max_restarts, at_least=0)
        if self.kv_cache_bytes is not None and self.gpu_memory_utilization is not None:
            raise ConfigError(
                f"{key}.gpu_memory_utilization has no effect with {key}.kv_cache_bytes: remove one of them."
            )
        for name in self.engine_kwargs:
            if name in RESERVED_ENGINE_KWARGS:
                raise ConfigError(
                    f"{key}.engine_kwargs.{name} has a key of its own: set {RESERVED_ENGINE_KWARGS[name]} instead."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Of every completion; evaluation has its own. How many a prompt gets is algorithm.group_size, each with a seed of its own."""

    temperature: float = 1.0
    """Divides logits; 0 is greedy. Training needs it above 0, and the engine divides by the same."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this is kept."""
    top_k: int = 0
    """Only the most likely k are kept; 0 keeps all."""
    max_tokens: int = 512
    """Longest completion, end token included."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the end token; the text stays in the completion's tokens."""

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, at_least=0)
        check_range("top_p", self.top_p, above=0, at_most=1)
        check_range("top_k", self.top_k, at_least=0)
        check_range("max_tokens", self.max_tokens, at_least=1)
        if "" in self.stop:
            raise ConfigError(
                f"stop is {list(self.stop)}, but an empty text would end every completion at once: take it out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The sampler of a training run."""

    sampler: Literal["hf", "vllm"] = "hf"
    """hf: continuous batching on transformers, runs anywhere; vllm: servers in processes of their own."""
    num_replicas: int = 1
    """Servers among which requests are shared; more than 1 needs sampler vllm."""
    max_concurrent: int = 256
    """Sequences that one replica decodes together."""
    dtype: Literal["bf16", "fp32"] = "fp32"
    """Of the sampler's weights."""
    pool: str = "train"
    """ray only: resource pool of the sampler; the roles' own pool colocates it with them."""
    canary: bool = True
    """After each weight sync, compare a prompt's log-probs in engine and sampler."""
    canary_tolerance: float | None = None
    """Largest difference of a log-prob, in nats, that the canary accepts. None accepts 0.05, or 0.3
    where the sampler or the actor computes in bf16."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """sampler vllm only."""

    def __post_init__(self) -> None:
        check_range("rollout.num_replicas", self.num_replicas, at_least=1)
        check_range("rollout.max_concurrent", self.max_concurrent, at_least=1)
        if self.sampler == "hf" and self.num_replicas > 1:
            raise ConfigError(
                f"rollout.num_replicas is {self.num_replicas}, but rollout.sampler hf is one process: use rollout=vllm."
            )
        check_range("rollout.canary_tolerance", self.canary_tolerance, above=0)

    def resolve_canary_tolerance(self, actor_compute: str) -> float:
        """Return the canary's tolerance in nats for an actor that computes in `actor_compute`."""
        if self.canary_tolerance is not None:
            return self.canary_tolerance
        # Two correct bf16 implementations of a 0.4B model differed by 0.06 on an H100, and one
        # by 0.12 from float32. Wrong weights differ by 1 and more.
        return 0.05 if self.dtype == "fp32" and actor_compute == "fp32" else 0.3


TransportName = Literal[
    "auto", "in_process", "object_store", "shared_memory", "cuda_ipc", "collective"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    """One publish of a numbered set of weights."""

    transport: TransportName = "auto"
    """auto: in_process (sampler hf, runtime inline), object_store (sampler hf, runtime ray); with sampler vllm by where actor and servers
    are: cuda_ipc on one GPU, collective (NCCL) to GPUs of their own, shared_memory on the CPUs of one host, collective (gloo) on those of
    several. In loops that sample ahead, a server that dies is started again only with shared_memory."""
    content: Literal["full", "adapter", "delta"] = "full"
    """full sends every weight, an adapter merged; adapter sends the LoRA adapter alone, under a new version each time; delta sends the
    elements that changed since the last set, after a first whole one. The sampler's weights are the same bits with full and delta."""
    max_changed_fraction: float = 0.25
    """With content delta: a tensor of which a larger share of the elements changed is sent whole."""
    bucket_bytes: int = 256 << 20
    """Largest part that travels at once; a larger tensor travels alone."""
    checksum: bool = True
    """Compare a checksum of every bucket after its journey."""

    def __post_init__(self) -> None:
        check_range(
            "weight_sync.max_changed_fraction", self.max_changed_fraction, at_least=0, at_most=1
        )
        check_range("weight_sync.bucket_bytes", self.bucket_bytes, at_least=1 << 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronyConfig:
    """Of loop async; one_step_off has a staleness of one and no other choice."""

    max_staleness: int = 1
    """Updates of the weights between the first token of a completion and the step that trains on it, at most."""
    partial_rollouts: bool = True
    """At a weight sync, stop unfinished completions and let them go on under the new weights, every token with its own version; False
    waits until they are finished."""

    def __post_init__(self) -> None:
        check_range("asynchrony.max_staleness", self.max_staleness, at_least=1)
