"""How the actor's weights reach the sampler."""

from dataclasses import dataclass
from typing import Literal

from temper_trainer.config.ranges import check_range

TransportName = Literal["auto", "in_process", "object_store", "shared_memory", "cuda_ipc", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    """One publish of a numbered set of weights."""

    transport: TransportName = "auto"
    """auto takes the only one that fits: in_process (sampler hf, runtime inline), object_store (sampler hf, runtime ray), shared_memory
    (sampler vllm). cuda_ipc (sampler and actor on the same GPU) and collective (NCCL, or gloo on CPUs, between actor and servers) are for
    sampler vllm."""
    content: Literal["full", "adapter"] = "full"
    """full sends every weight, an adapter merged; adapter sends the LoRA adapter alone, under a new version each time."""
    bucket_bytes: int = 256 << 20
    """Largest part that travels at once; a larger tensor travels alone."""
    checksum: bool = True
    """Compare a checksum of every bucket after its journey."""

    def __post_init__(self) -> None:
        check_range("weight_sync.bucket_bytes", self.bucket_bytes, at_least=1 << 10)
