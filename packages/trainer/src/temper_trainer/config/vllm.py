"""Settings of vLLM's servers; they mean something with rollout.sampler=vllm alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from temper_engine_api.errors import ConfigError
from temper_trainer.config.ranges import check_range

OWN_KEYS = {
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
            if name in OWN_KEYS:
                raise ConfigError(
                    f"{key}.engine_kwargs.{name} has a key of its own: set {OWN_KEYS[name]} instead."
                )
