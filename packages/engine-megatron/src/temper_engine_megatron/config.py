"""Config of the Megatron engine. Importing this does not import torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig, Scalar

Float8Scaling = Literal["none", "tensorwise", "blockwise"]
"""Granularity of the scales with which tensors are rounded to float8."""
Override = Scalar | tuple[Scalar, ...]
"""Value of a field in Megatron's own configs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig(EngineConfig):
    """Config of MegatronEngine: how a model is split across ranks.

    Ranks that remain after dividing by `replica_size` are data parallel.
    """

    tensor_parallel: int = 1
    """Number of ranks that split each layer's matrices."""
    sequence_parallel: bool = False
    """Split activations outside of these matrices along the sequence, over the tensor-parallel
    ranks.
    """
    pipeline_parallel: int = 1
    """Number of pipeline stages; layers are divided as evenly as possible."""
    layers_per_stage: tuple[int, ...] = ()
    """Number of layers per chunk; empty divides them evenly.

    One number per stage. With virtual_pipeline, the first chunks of all stages come before the
    second ones."""
    virtual_pipeline: int | None = None
    """Chunks of layers per stage (interleaved schedule); null is a single one.

    The micro-batch count becomes a multiple of the stage count."""
    context_parallel: int = 1
    """Number of ranks that split a micro-batch's tokens."""
    expert_parallel: int = 1
    """Number of ranks that divide a layer's experts among them.

    These are the data-, context- and tensor-parallel ranks, so no further ranks are needed."""
    expert_tensor_parallel: int | None = None
    """Number of ranks that split an expert's matrices; null is tensor_parallel."""
    expert_products: Literal["auto", "grouped", "sequential"] = "auto"
    """Kernel for the experts' matrix products.

    `grouped` computes all experts in one product, which needs bf16 on CUDA and no adapter on
    experts; `sequential` computes one expert after another; `auto` is grouped where possible."""
    router_aux_loss: float = 0.0
    """Coefficient of the experts' load-balancing loss, which is added to the objective.

    Each sequence's loss is weighted by its fraction of the trained tokens. Losses of all layers
    are added."""
    router_z_loss: float = 0.0
    """Coefficient of the router z-loss, which keeps router logits small.

    The loss of a sequence averages the squared logsumexp over its tokens. It is weighted like
    router_aux_loss."""
    distributed_optimizer: bool = False
    """Shard the optimizer state across data-parallel ranks (ZeRO-1)."""
    head_chunk_tokens: int = 2048
    """Number of positions whose logits are in memory at once."""
    compile_head: bool = False
    """Compile each pass over logits to one kernel; worthwhile on CUDA."""
    layers: Literal["torch", "transformer_engine"] = "torch"
    """Implementation of the linear layers of attention and dense MLPs.

    transformer_engine needs CUDA, 16-bit compute and the package transformer-engine. It adds
    weight gradients to the float32 sum inside the product. Norms, attention, experts, latent and
    linear attention, Mamba layers and the output head remain the same."""
    float8: Float8Scaling = "none"
    """Compute the products of these layers in float8; needs `layers: transformer_engine`.

    tensorwise has one scale per tensor, so log-probs depend on the rest of the micro-batch.
    blockwise has a scale per 128 numbers of a token, and per 128 x 128 numbers of a weight. Needs
    bf16 compute, and a GPU with float8 (Ada, Hopper or newer; blockwise Hopper or newer)."""

    remove_padding: bool = True
    """Concatenate a micro-batch's sequences.

    Otherwise each is a row padded to the longest, which takes more time and memory."""
    recompute: Literal["none", "attention", "layers"] = "none"
    """Activations that the backward pass recomputes: of attention, or of entire decoder layers."""
    override_transformer_config: Mapping[str, Override] = field(default_factory=dict, hash=False)
    """Fields of megatron-core's TransformerConfig, such as ``bias_activation_fusion: true``.

    Unknown fields are rejected. Fields that follow from the model or from another setting are
    rejected too."""
    override_ddp_config: Mapping[str, Override] = field(default_factory=dict, hash=False)
    """Fields of DistributedDataParallelConfig, such as ``pad_buckets_for_high_nccl_busbw``."""
    override_optimizer_config: Mapping[str, Override] = field(default_factory=dict, hash=False)
    """Fields of OptimizerConfig, such as ``decoupled_weight_decay``."""

    def __post_init__(self) -> None:
        # With slots=True, super() without arguments refers to the class before slots were added.
        EngineConfig.__post_init__(self)
        for name in (
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "expert_parallel",
            "head_chunk_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if self.expert_tensor_parallel_size < 1:
            raise ConfigError(
                f"expert_tensor_parallel is {self.expert_tensor_parallel}, but must be at least 1, "
                "or null for tensor_parallel."
            )
        if self.expert_tensor_parallel_size != self.tensor_parallel and self.expert_parallel == 1:
            raise ConfigError(
                f"expert_tensor_parallel is {self.expert_tensor_parallel} and tensor_parallel "
                f"{self.tensor_parallel}: they can differ only if experts are divided too. Raise "
                "expert_parallel, or set expert_tensor_parallel to null."
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "sequence_parallel splits over the tensor-parallel ranks, but tensor_parallel is "
                "1: raise it, or turn sequence_parallel off."
            )
        if self.virtual_pipeline is not None and (
            self.virtual_pipeline < 2 or self.pipeline_parallel == 1
        ):
            raise ConfigError(
                f"virtual_pipeline is {self.virtual_pipeline} and pipeline_parallel "
                f"{self.pipeline_parallel}, but both must be at least 2: set virtual_pipeline to "
                "null for one chunk per stage."
            )
        self._check_stages()
        self._check_layers()

    def _check_stages(self) -> None:
        num_chunks = self.pipeline_parallel * (self.virtual_pipeline or 1)
        if self.layers_per_stage and self.pipeline_parallel == 1:
            raise ConfigError(
                f"layers_per_stage is {list(self.layers_per_stage)}, but pipeline_parallel is 1: "
                "remove it."
            )
        if self.layers_per_stage and (
            len(self.layers_per_stage) != num_chunks or min(self.layers_per_stage) < 1
        ):
            raise ConfigError(
                f"layers_per_stage is {list(self.layers_per_stage)}, but must be {num_chunks} "
                "numbers of at least 1, one per chunk: leave it empty to divide the layers evenly."
            )
        for name in ("router_aux_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but must be at least 0 and finite."
                )

    def _check_layers(self) -> None:
        if self.float8 != "none" and self.layers != "transformer_engine":
            raise ConfigError(
                f"float8 is {self.float8}, but layers is {self.layers}, and only TransformerEngine "
                "has float8 products here: set layers to transformer_engine, or float8 to none."
            )
        if self.float8 != "none" and self.precision.compute != "bf16":
            raise ConfigError(
                f"float8 is {self.float8}, but precision.compute is {self.precision.compute}: "
                "float8 products have bf16 inputs and outputs, so set it to bf16."
            )
        if self.float8 != "none" and self.lora.is_enabled:
            raise ConfigError(
                f"float8 is {self.float8}, but lora is on, and adapters over float8 layers are not "
                "supported: set float8 to none."
            )
        if self.float8 != "none" and self.model.model_type != "language_model":
            # Gradients follow each other in one buffer. The head's bias is one number, and shifts
            # those after it to addresses that float8 products cannot write to.
            raise ConfigError(
                f"float8 is {self.float8}, but model.model_type is {self.model.model_type}, whose "
                "scalar head prevents float8 products of gradients: set float8 to none."
            )
        if self.float8 == "blockwise" and self.sequence_parallel:
            raise ConfigError(
                "float8 is blockwise and sequence_parallel is on, which have not been tested "
                "together: set float8 to tensorwise, or turn sequence_parallel off."
            )
        if self.layers == "transformer_engine" and self.precision.compute == "fp32":
            raise ConfigError(
                "layers is transformer_engine, but precision.compute is fp32, which "
                "TransformerEngine multiplies in TF32: set precision.compute to bf16, or layers to "
                "torch."
            )
        if self.layers == "transformer_engine" and self.device == "cpu":
            raise ConfigError(
                "layers is transformer_engine, but device is cpu, and TransformerEngine needs "
                "CUDA: set layers to torch."
            )

    def check_num_ranks(self, num_ranks: int) -> None:
        """Check that the ranks can be divided into copies of the experts.

        Raises:
            ConfigError: If they cannot.
        """
        expert_tensor_parallel = self.expert_tensor_parallel_size
        size = expert_tensor_parallel * self.expert_parallel * self.pipeline_parallel
        if num_ranks % size:
            raise ConfigError(
                f"expert_tensor_parallel {expert_tensor_parallel} x expert_parallel "
                f"{self.expert_parallel} x pipeline_parallel {self.pipeline_parallel} is {size}, "
                f"which must divide the {num_ranks} ranks: change one of these sizes, or the "
                "number of ranks."
            )

    @property
    def replica_size(self) -> int:
        """Number of ranks that together have one model copy and see the same samples."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Number of ranks that split an expert's matrices."""
        return (
            self.tensor_parallel
            if self.expert_tensor_parallel is None
            else self.expert_tensor_parallel
        )
