"""How the actor's weights reach the sampler."""

from dataclasses import dataclass
from typing import Literal

from temper_trainer.config.ranges import check_range

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
