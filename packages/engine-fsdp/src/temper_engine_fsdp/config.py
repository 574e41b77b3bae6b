"""Settings of the FSDP engine beyond what every engine has. Importing this needs no torch."""

from dataclasses import dataclass
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig

AttentionKernel = Literal["auto", "sdpa_varlen", "torch_varlen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig(EngineConfig):
    """How a model is sharded and computed with torch's fully_shard (FSDP2)."""

    fsdp_size: int | None = None
    """Ranks that one copy of the parameters is sharded over; None is all of them, fewer replicate (hybrid sharding)."""
    reshard_after_forward: bool = True
    """Free gathered parameters of a layer after its forward and gather them again for its backward: less memory, more traffic."""
    wrap_modules: tuple[str, ...] = ()
    """Class names of the modules that are sharded one by one; empty takes the decoder layers that the model names itself."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: about 20 % slower, far less activation memory."""
    attention: AttentionKernel = "auto"
    """auto is torch_varlen on CUDA in bf16, else sdpa_varlen: causal SDPA over buckets of sequences of similar length."""
    head_chunk_tokens: int | None = None
    """Positions whose logits are held at once; None fits 128 MiB of float32 logits on a CPU and 1 GiB on CUDA."""
    fast_float32_matmul: bool = True
    """Take oneDNN's float32 matmul kernels on a CPU where a test at start finds them as exact as the default ones."""
    save_huggingface_weights: bool = False
    """Write safetensors beside ``huggingface/config.json`` in every checkpoint."""

    def __post_init__(self) -> None:
        if self.fsdp_size is not None and self.fsdp_size < 1:
            raise ConfigError(f"fsdp_size is {self.fsdp_size}, but must be at least 1: null shards over all ranks.")
        if self.head_chunk_tokens is not None and self.head_chunk_tokens < 1:
            raise ConfigError(f"head_chunk_tokens is {self.head_chunk_tokens}, but must be at least 1: null chooses by memory.")
        if self.attention == "torch_varlen" and self.device == "cpu":
            raise ConfigError("attention torch_varlen needs CUDA, but device is cpu: use auto or sdpa_varlen.")
        if self.attention == "torch_varlen" and self.precision.compute != "bf16":
            raise ConfigError("attention torch_varlen computes in bf16, but precision.compute is fp32: use sdpa_varlen.")
