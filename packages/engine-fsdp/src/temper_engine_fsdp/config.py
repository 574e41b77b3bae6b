"""FSDP engine settings, in addition to those that all engines have. Does not import torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.settings_check import find_write_error
from temper_engine_api.specs import EngineConfig, ModelSpec

AttentionKernel = Literal["auto", "sdpa_varlen", "torch_varlen"]
Float8Scaling = Literal["none", "rowwise", "tensorwise"]
Strategy = Literal["fsdp2", "fsdp1"]
EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of model configs, of which a mixture of experts has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig(EngineConfig):
    """Sharding, memory and kernels of the PyTorch FSDP engine."""

    strategy: Strategy = "fsdp2"
    """fsdp2 is `fully_shard`, fsdp1 is `FullyShardedDataParallel`.

    Use fsdp1 only to reproduce results and checkpoints of systems built on it; it is slower.
    """
    sequence_parallel: int = 1
    """Ranks that split the tokens of each micro-batch (Ulysses). Must divide the world size and the
    head count."""
    fsdp_size: int | None = None
    """Ranks over which one copy of the parameters is sharded; None means all, fewer is hybrid
    sharding."""
    expert_parallel: bool = False
    """Compute each expert on the rank that has its shard, and send tokens there.

    The parameters of experts are then never gathered. Needs fsdp2, and a number of experts that
    `fsdp_size` divides. With fewer ranks than all, every copy of the parameters has all experts.
    """
    reshard_after_forward: bool | int = True
    """Free gathered parameters of a layer after its forward pass and gather them again for
    backward.

    Uses less memory and more traffic. With a number, parameters stay sharded across that many ranks
    between forward and backward, such as all ranks on a node.
    """
    forward_prefetch: int = 0
    """Number of layers whose parameters are gathered ahead, in addition to torch's overlap."""
    wrap_modules: tuple[str, ...] = ()
    """Class names of the modules to shard one by one; empty means the decoder layers."""
    wrap_together: int = 1
    """Number of consecutive modules that form one FSDP unit.

    Gives fewer and larger messages. Helps if layers are so small that computing one takes less time
    than launching the next layer's kernels; 8 suits a 0.5B model.
    """
    activation_checkpointing: bool = False
    """Recompute decoder layers in the backward pass: about 20 % slower, far less memory."""
    checkpointing_keeps_products: bool = False
    """Selective checkpointing: keep the outputs of attention and every second matmul."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in host memory until the backward pass."""
    attention: AttentionKernel = "auto"
    """Attention kernel.

    sdpa_varlen runs causal SDPA over buckets of similarly long sequences, on cuDNN for buckets
    of 2,048 tokens and more on CUDA in 16 bits. torch_varlen is FlashAttention 2, without dropout.
    auto means torch_varlen on CUDA in 16 bits if the model has no attention dropout, else
    sdpa_varlen. On an H200, updates with sequences of 16k tokens are 1.3 to 1.4 times as fast with
    sdpa_varlen; at mixed lengths with a median of 3k both are equally fast.
    """
    compile_layers: bool = False
    """Compile each decoder layer with torch.compile; with `head_keeps_logits` also the head.

    Faster after about a minute of compilation.
    """
    liger_layers: bool = False
    """Use Liger's kernels for norms and gated MLPs on CUDA, after a test of their accuracy."""
    float8: Float8Scaling = "none"
    """Compute the products of linear decoder layers in float8, with torchao.

    rowwise has a scale per token and per output, so the log-probs of a sequence do not depend on
    the rest of its micro-batch. tensorwise has one scale per tensor: faster, but less exact, and
    log-probs depend on the micro-batch. Needs bf16 compute, and a GPU with float8 (Ada, Hopper or
    newer); on a CPU it is emulated slowly. Worth it with wide layers and `compile_layers`.
    """
    head_keeps_logits: bool = False
    """Keep all logits of a micro-batch for the backward pass. False computes them in chunks, and
    again in the backward pass.

    Takes 2 bytes x tokens x vocabulary in bf16.
    """
    head_chunk_tokens: int | None = None
    """Positions per chunk of logits; None means 128 MiB of float32 logits on CPU, 1 GiB on CUDA."""
    fast_float32_matmul: bool = True
    """Use oneDNN's float32 matmul on a CPU if a test shows that it is as exact as the default."""
    router_aux_loss: float = 0.0
    """Coefficient of the experts' load-balancing loss, which is added to the objective.

    Each sequence's loss is weighted by its fraction of the trained tokens. Losses of all layers
    are added."""
    router_z_loss: float = 0.0
    """Coefficient of the router z-loss, which keeps router logits small.

    The loss of a sequence averages the squared logsumexp over its tokens. It is weighted like
    router_aux_loss."""
    numa_affinity: bool = False
    """Pin each rank to the CPU cores near its GPU; no effect if Linux does not report them."""
    save_huggingface_weights: bool = False
    """Write safetensors next to `huggingface/config.json` in every checkpoint."""
    huggingface_shard_bytes: int = 4 << 30
    """Maximum size of a safetensors file; a larger tensor has a separate file."""
    profile_to: str | None = None
    """Folder for torch profiler traces, one file per rank; None disables profiling."""
    profile_from: int = 5
    """First profiled update, counted from 1 at process start; earlier updates warm up."""
    profile_updates: int = 2
    """Number of profiled updates."""
    profile_memory: bool = False
    """Also write a CUDA memory history of these updates."""

    def __post_init__(self) -> None:
        # super() does not work here: with slots=True the decorator replaces the class that it
        # refers to.
        EngineConfig.__post_init__(self)
        self._check_ranges()
        self._check_kernels()
        self._check_checkpointing()
        self._check_profile()
        if self.numa_affinity and self.device == "cpu":
            raise ConfigError(
                "numa_affinity is on, but has no effect with device cpu: set it to false."
            )
        if self._is_changed("huggingface_shard_bytes") and not self.save_huggingface_weights:
            raise ConfigError(
                f"huggingface_shard_bytes is {self.huggingface_shard_bytes}, but has no effect "
                "without save_huggingface_weights: set that to true, or remove it."
            )
        if self.strategy == "fsdp1":
            self._check_fsdp1()

    def _check_ranges(self) -> None:
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
        for name in ("router_aux_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but must be at least 0 and finite: 0 is no "
                    "loss."
                )
        if self.wrap_together < 1:
            raise ConfigError(
                f"wrap_together is {self.wrap_together}, but must be at least 1: 1 shards modules "
                "one by one."
            )
        if self.forward_prefetch < 0:
            raise ConfigError(
                f"forward_prefetch is {self.forward_prefetch}, but must be at least 0: 0 leaves "
                "prefetching to torch."
            )
        if not isinstance(self.reshard_after_forward, bool) and self.reshard_after_forward < 2:
            raise ConfigError(
                f"reshard_after_forward is {self.reshard_after_forward}, but must be true, false, "
                "or a number of ranks of at least 2."
            )
        if self.huggingface_shard_bytes < 1:
            raise ConfigError(
                f"huggingface_shard_bytes is {self.huggingface_shard_bytes}, but must be at least "
                "1: the default is 4 GiB."
            )

    def _check_kernels(self) -> None:
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
            raise ConfigError("liger_layers needs CUDA, but device is cpu: set it to false.")
        if self.liger_layers and self.compile_layers:
            raise ConfigError(
                "liger_layers and compile_layers are both on, but compile_layers already fuses "
                "these layers: set one to false."
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

    def check_folders(self) -> None:
        """Check that profiles can be written, without creating their folder.

        Raises:
            ConfigError: If the folder cannot be created or written.
        """
        error = None if self.profile_to is None else find_write_error(self.profile_to)
        if error is not None:
            raise ConfigError(
                f"profile_to is {self.profile_to}, which cannot be written: {error.strerror}. "
                "Choose a folder with write permission."
            ) from error

    def check_num_ranks(self, num_ranks: int) -> None:
        """Check that these ranks can shard the model as configured.

        Raises:
            ConfigError: If fsdp_size or reshard_after_forward is no divisor, or expert_parallel has
                no effect or cannot divide the experts evenly.
        """
        num_shards = num_ranks if self.fsdp_size is None else self.fsdp_size
        if num_ranks % num_shards:
            raise ConfigError(
                f"fsdp_size is {num_shards}, but must divide the world size {num_ranks}: choose a "
                "divisor."
            )
        if self.expert_parallel and num_shards == 1 < num_ranks:
            raise ConfigError(
                "expert_parallel is on, but has no effect with fsdp_size 1, which gives every rank "
                "all experts: set fsdp_size to null or above 1, or expert_parallel to false."
            )
        if self.expert_parallel:
            check_divisible_expert_count(_read_num_experts(self.model), num_shards=num_shards)
        reshards = self.reshard_after_forward
        if not isinstance(reshards, bool) and num_shards > 1 and num_shards % reshards:
            raise ConfigError(
                f"reshard_after_forward is {reshards}, but must be true, false or a divisor of the "
                f"{num_shards} shards."
            )

    @property
    def replica_size(self) -> int:
        """Number of ranks that share one pack."""
        return self.sequence_parallel

    def _is_changed(self, name: str) -> bool:
        """Return True if a field differs from its default."""
        return bool(
            getattr(self, name)
            != next(field.default for field in fields(self) if field.name == name)
        )

    def _check_profile(self) -> None:
        for name in ("profile_from", "profile_updates", "profile_memory"):
            if self.profile_to is None and self._is_changed(name):
                value = getattr(self, name)
                raise ConfigError(
                    f"{name} is {value}, but has no effect without profile_to: set profile_to to a "
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
                    f"{name} is on, but has no effect without activation_checkpointing: set that "
                    f"to true, or {name} to false."
                )
        if self.checkpointing_keeps_products and self.compile_layers:
            raise ConfigError(
                "checkpointing_keeps_products and compile_layers are both on, but compiled layers "
                "fuse operators, so there are no separate products to keep: set one to false."
            )

    def _check_fsdp1(self) -> None:
        if self.expert_parallel:
            raise ConfigError(
                "expert_parallel is on, but strategy fsdp1 shards flattened tensors, which are not "
                "complete experts: use strategy fsdp2."
            )
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
                f"forward_prefetch is {self.forward_prefetch}, but strategy fsdp1 prefetches at "
                "most 1 layer: set it to 0 or 1."
            )


def check_divisible_expert_count(num_experts: int, *, num_shards: int) -> None:
    """Check that every rank gets the same number of a layer's experts.

    Raises:
        ConfigError: If it does not.
    """
    if num_experts % num_shards:
        raise ConfigError(
            f"expert_parallel divides the {num_experts} experts of a layer over {num_shards} "
            "ranks, which is not possible evenly: set fsdp_size to a number of ranks that "
            "divides them, or expert_parallel to false."
        )


def _read_num_experts(model: ModelSpec) -> int:
    """Return the number of experts that a model's settings name, or 0 if they name none.

    A model whose settings name none is checked when it is built.
    """
    settings: Mapping[str, Any] = model.to_config_fields()
    if model.path is not None:
        file = Path(model.path, "config.json")
        settings = json.loads(file.read_text()) if file.is_file() else {}
    text = settings.get("text_config") or settings
    return int(next(filter(None, (text.get(name) for name in EXPERT_COUNT_NAMES)), 0))
