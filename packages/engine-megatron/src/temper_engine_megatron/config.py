"""Settings of the Megatron engine beyond what every engine has. Importing this needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig, Scalar

Override = Scalar | tuple[Scalar, ...]
"""Value of a field of Megatron's own configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig(EngineConfig):
    """How a model is spread over ranks. What is left after dividing the ranks by all sizes below is data parallel."""

    tensor_parallel: int = 1
    """Ranks that one layer's matrices are split over."""
    sequence_parallel: bool = False
    """Split the activations between those matrices along the sequence too, over the same ranks."""
    pipeline_parallel: int = 1
    """Stages that the layers are divided over, as evenly as their number allows."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each chunk where they are not divided evenly: one number a stage, or with virtual_pipeline the first chunk of all stages
    before the second. Empty divides evenly."""
    virtual_pipeline: int | None = None
    """ModelChunks of layers per stage (interleaved schedule); null is one. The number of micro-batches becomes a multiple of the stages."""
    context_parallel: int = 1
    """Ranks that the tokens of a micro-batch are split over."""
    expert_parallel: int = 1
    """Ranks that the experts of a layer are divided over; they are taken from the data-, context- and tensor-parallel ranks."""
    expert_tensor_parallel: int | None = None
    """Ranks that one expert's matrices are split over; null is tensor_parallel."""
    router_aux_loss: float = 0.0
    """Weight of the load-balancing loss of experts, added to the objective: that of each micro-batch by its share of trained tokens, the
    sum over layers. It depends on the split into micro-batches by its nature."""
    router_z_loss: float = 0.0
    """Weight of the z-loss of routers, which keeps their logits small: the mean over the tokens of a micro-batch of the squared logsumexp,
    by the micro-batch's share of trained tokens, the sum over layers."""
    distributed_optimizer: bool = False
    """Keep each data-parallel rank's share of the optimiser's state only (ZeRO-1), where there is an optimiser."""
    head_chunk_tokens: int = 2048
    """Positions whose logits are held at once."""
    compile_head: bool = False
    """Make one compiled kernel of each pass over logits; pays off on CUDA."""

    remove_padding: bool = True
    """Lay the sequences of a micro-batch end to end; otherwise each is a row that is padded to the longest, which costs time and memory."""
    recompute: Literal["none", "attention", "layers"] = "none"
    """What is computed again in the backward pass instead of being kept: nothing, the attention, or each decoder layer whole."""
    override_transformer_config: Mapping[str, Override] = field(default_factory=dict, hash=False)
    """Fields of megatron-core's TransformerConfig by name, such as ``bias_activation_fusion: true``; those that a field of this
    configuration or the model decides are refused, and so are names that it does not have."""
    override_ddp_config: Mapping[str, Override] = field(default_factory=dict, hash=False)
    """The same of DistributedDataParallelConfig, such as ``pad_buckets_for_high_nccl_busbw``."""
    override_optimizer_config: Mapping[str, Override] = field(default_factory=dict, hash=False)
    """The same of OptimizerConfig, such as ``decoupled_weight_decay``."""

    def __post_init__(self) -> None:
        # engine-api 0.1.1 and those before check nothing there.
        getattr(EngineConfig, "__post_init__", lambda _: None)(self)
        for name in (
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "expert_parallel",
            "head_chunk_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if self.expert_ranks_of_a_matrix < 1:
            raise ConfigError(
                f"expert_tensor_parallel is {self.expert_tensor_parallel}, but must be at least 1; null is tensor_parallel."
            )
        if self.expert_ranks_of_a_matrix != self.tensor_parallel and self.expert_parallel == 1:
            raise ConfigError(
                f"expert_tensor_parallel is {self.expert_tensor_parallel} and tensor_parallel {self.tensor_parallel}: "
                "they may differ only where experts are divided too, so raise expert_parallel, or leave expert_tensor_parallel null."
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "sequence_parallel splits over the tensor-parallel ranks, but tensor_parallel is 1: raise it, or turn it off."
            )
        if self.virtual_pipeline is not None and (
            self.virtual_pipeline < 2 or self.pipeline_parallel == 1
        ):
            raise ConfigError(
                f"virtual_pipeline is {self.virtual_pipeline} at pipeline_parallel {self.pipeline_parallel}: it needs two chunks or more "
                "on two stages or more; null is one chunk a stage."
            )
        self._check_stages()

    def _check_stages(self) -> None:
        chunks = self.pipeline_parallel * (self.virtual_pipeline or 1)
        if self.layers_per_stage and self.pipeline_parallel == 1:
            raise ConfigError(
                f"layers_per_stage is {list(self.layers_per_stage)}, but pipeline_parallel is 1: remove it."
            )
        if self.layers_per_stage and (
            len(self.layers_per_stage) != chunks or min(self.layers_per_stage) < 1
        ):
            raise ConfigError(
                f"layers_per_stage is {list(self.layers_per_stage)}, but must be {chunks} numbers of at least 1: one for each chunk "
                "of each stage; leave it empty to divide the layers evenly."
            )
        for name in ("router_aux_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 0.")

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model and see the same samples."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def expert_ranks_of_a_matrix(self) -> int:
        """Ranks that one expert's matrices are split over."""
        return (
            self.tensor_parallel
            if self.expert_tensor_parallel is None
            else self.expert_tensor_parallel
        )
