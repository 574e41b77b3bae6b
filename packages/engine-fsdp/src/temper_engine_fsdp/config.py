"""Settings of the FSDP engine beyond what every engine has. Importing this needs no torch."""

from dataclasses import dataclass, fields
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig

AttentionKernel = Literal["auto", "sdpa_varlen", "torch_varlen"]
Strategy = Literal["fsdp2", "fsdp1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig(EngineConfig):
    """How a model is sharded and computed with PyTorch FSDP."""

    strategy: Strategy = "fsdp2"
    """fsdp2 is fully_shard; fsdp1 is FullyShardedDataParallel, for numbers and checkpoints of what was built on it, not for speed."""
    sequence_parallel: int = 1
    """Ranks that share one pack (Ulysses): each holds a slice of its tokens, and in attention some of the heads, which it must divide."""
    fsdp_size: int | None = None
    """Ranks that one copy of the parameters is sharded over; None is all of them, fewer replicate (hybrid sharding)."""
    reshard_after_forward: bool | int = True
    """Free gathered parameters of a layer after its forward and gather them again for its backward: less memory, more traffic.
    A number keeps them sharded over that many ranks instead, such as those of one node."""
    forward_prefetch: int = 0
    """Layers whose parameters are gathered ahead of the one that computes, beyond what torch overlaps by itself."""
    wrap_modules: tuple[str, ...] = ()
    """Class names of the modules that are sharded one by one; empty takes the decoder layers that the model names itself."""
    wrap_together: int = 1
    """Consecutive modules whose parameters are gathered, and whose gradients are reduced, as one: fewer and larger messages where layers
    are so small that they compute for less time than the host takes to ask for the next (8 for a model of half a billion parameters)."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: about 20 % slower, far less activation memory."""
    checkpointing_keeps_products: bool = False
    """Selective checkpointing: keep the results of attention and of every second matrix product, and compute only the rest again."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in host memory until the backward pass needs them."""
    attention: AttentionKernel = "auto"
    """auto is torch_varlen on CUDA in bf16, else sdpa_varlen: causal SDPA over buckets of sequences of similar length.
    In 16 bits on CUDA sdpa_varlen runs buckets of 2,048 tokens and more on cuDNN. On an H200 that makes updates 1.3 to 1.4 times as
    fast as torch_varlen (FlashAttention 2) at 16k tokens a sequence, and as fast at mixed lengths with a median of 3k."""
    compile_layers: bool = False
    """Let torch.compile make the kernels of each decoder layer, and of a head that keeps its logits: faster after a minute of compiling."""
    liger_layers: bool = False
    """Take Liger's kernels for norms and gated units on CUDA, after a test at start finds them as exact as the plain formulas."""
    head_keeps_logits: bool = False
    """Hold all logits of a micro-batch in the compute dtype (bf16: 2 bytes x tokens x vocabulary) instead of computing chunks twice."""
    head_chunk_tokens: int | None = None
    """Positions whose logits are held at once; None fits 128 MiB of float32 logits on a CPU and 1 GiB on CUDA."""
    fast_float32_matmul: bool = True
    """Take oneDNN's float32 matmul kernels on a CPU where a test at start finds them as exact as the default ones."""
    numa_affinity: bool = False
    """Keep each rank on the processor cores near its GPU; where Linux tells none it changes nothing, and the log says so."""
    save_huggingface_weights: bool = False
    """Write safetensors beside ``huggingface/config.json`` in every checkpoint."""
    huggingface_shard_bytes: int = 4 << 30
    """Largest safetensors file; a tensor that is larger has one of its own."""
    profile_to: str | None = None
    """Folder for a trace of torch's profiler, one file a rank; None profiles nothing."""
    profile_from: int = 5
    """First update of the trace, counted from 1 since this process began: the earlier ones warm up."""
    profile_updates: int = 2
    """Updates in the trace."""
    profile_memory: bool = False
    """Write a history of the CUDA device's memory over the same updates beside it."""

    def __post_init__(self) -> None:
        # engine-api 0.1.1 and those before check nothing there.
        getattr(EngineConfig, "__post_init__", lambda _: None)(self)
        if self.sequence_parallel < 1:
            raise ConfigError(
                f"sequence_parallel is {self.sequence_parallel}, but must be at least 1: 1 leaves "
                "every pack to one rank."
            )
        if self.fsdp_size is not None and self.fsdp_size < 1:
            raise ConfigError(
                f"fsdp_size is {self.fsdp_size}, but must be at least 1: null shards over all "
                "ranks."
            )
        if self.head_chunk_tokens is not None and self.head_chunk_tokens < 1:
            raise ConfigError(
                f"head_chunk_tokens is {self.head_chunk_tokens}, but must be at least 1: null "
                "chooses by memory."
            )
        if self.head_keeps_logits and self.head_chunk_tokens is not None:
            raise ConfigError(
                "head_chunk_tokens has no effect with head_keeps_logits, which computes all logits "
                "at once: remove one."
            )
        if self.attention == "torch_varlen" and self.device == "cpu":
            raise ConfigError(
                "attention torch_varlen needs CUDA, but device is cpu: use auto or sdpa_varlen."
            )
        if self.attention == "torch_varlen" and self.precision.compute == "fp32":
            raise ConfigError(
                "attention torch_varlen computes in bf16 or fp16, but precision.compute is fp32: "
                "use sdpa_varlen."
            )
        if self.liger_layers and self.device == "cpu":
            raise ConfigError("liger_layers needs CUDA, but device is cpu: switch it off.")
        if self.liger_layers and self.compile_layers:
            raise ConfigError(
                "liger_layers is on, but compile_layers makes such kernels by itself: switch one "
                "of them off."
            )
        if self.wrap_together < 1:
            raise ConfigError(
                f"wrap_together is {self.wrap_together}, but must be at least 1 module."
            )
        if self.forward_prefetch < 0:
            raise ConfigError(
                f"forward_prefetch is {self.forward_prefetch}, but must be at least 0 layers."
            )
        if not isinstance(self.reshard_after_forward, bool) and self.reshard_after_forward < 2:
            raise ConfigError(
                f"reshard_after_forward is {self.reshard_after_forward}, but must be true, false "
                "or a number of ranks from 2."
            )
        self._check_checkpointing()
        self._check_profile()
        if self.numa_affinity and self.device == "cpu":
            raise ConfigError(
                "numa_affinity has no effect with device cpu, where no GPU has processor cores "
                "near it: switch it off."
            )
        if self.huggingface_shard_bytes < 1:
            raise ConfigError(
                f"huggingface_shard_bytes is {self.huggingface_shard_bytes}, but must be at least "
                "1."
            )
        if self._is_changed("huggingface_shard_bytes") and not self.save_huggingface_weights:
            raise ConfigError(
                f"huggingface_shard_bytes is {self.huggingface_shard_bytes}, but has no effect "
                "without save_huggingface_weights: switch "
                "that on, or remove it."
            )
        if self.strategy == "fsdp1":
            self._check_fsdp1()

    @property
    def replica_size(self) -> int:
        """Ranks that share one pack."""
        return self.sequence_parallel

    def _is_changed(self, name: str) -> bool:
        """Whether a field has another value than its default."""
        return bool(
            getattr(self, name)
            != next(field.default for field in fields(self) if field.name == name)
        )

    def _check_profile(self) -> None:
        for name in ("profile_from", "profile_updates", "profile_memory"):
            if self.profile_to is None and self._is_changed(name):
                value = getattr(self, name)
                raise ConfigError(
                    f"{name} is {value}, but has no effect without profile_to: set that to a "
                    f"folder, or remove {name}."
                )
        for name, value in (
            ("profile_from", self.profile_from),
            ("profile_updates", self.profile_updates),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}, but must be at least 1.")

    def _check_checkpointing(self) -> None:
        for name, is_on in (
            ("checkpointing_keeps_products", self.checkpointing_keeps_products),
            ("offload_activations", self.offload_activations),
        ):
            if is_on and not self.activation_checkpointing:
                raise ConfigError(
                    f"{name} is on, but has no effect without activation_checkpointing: switch "
                    "that on too, or this off."
                )
        if self.checkpointing_keeps_products and self.compile_layers:
            raise ConfigError(
                "checkpointing_keeps_products chooses between operators, which compile_layers "
                "hides in kernels: switch one of them off."
            )

    def _check_fsdp1(self) -> None:
        if self.reshard_after_forward is not True:
            raise ConfigError(
                f"reshard_after_forward is {self.reshard_after_forward}, but strategy fsdp1 always "
                "reshards: leave it true."
            )
        if self.wrap_together > 1:
            raise ConfigError(
                f"wrap_together is {self.wrap_together}, but strategy fsdp1 wraps modules one by "
                "one: leave it at 1."
            )
        if self.forward_prefetch > 1:
            raise ConfigError(
                f"forward_prefetch is {self.forward_prefetch}, but strategy fsdp1 gathers at most "
                "1 layer ahead."
            )
