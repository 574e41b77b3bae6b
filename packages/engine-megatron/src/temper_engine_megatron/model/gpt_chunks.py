"""The chunks of a model that one rank holds: Megatron's GPTModel over packed tokens, which ends in hidden states, and how it is built.

In: a translation from Hugging Face and the process groups. Out: one module per virtual stage, in Megatron's data-parallel wrapper where
there is something to train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_megatron.adapter.adapter_placement import AdapterPlacement, TrainedHead
from temper_engine_megatron.bridge_compat import BridgeTranslation
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.model.config_overrides import plain
from temper_engine_megatron.model.layer_spec import build_block_spec
from temper_engine_megatron.model.output_head import OutputHead
from temper_engine_megatron.model.packed_attention import PackLayout, RowLayout
from temper_engine_megatron.runtime.process_groups import Membership

_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_RECOMPUTE: Mapping[str, dict[str, object]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
SCALAR_OUTPUTS = {"value_model": HeadOutput.VALUE, "reward_model": HeadOutput.SCORE}


class PackedGPTModel(GPTModel):
    """A chunk of a decoder. Positions are those it is given, and the last stage returns hidden states instead of logits."""

    rotary_frequencies: Tensor
    inputs_require_grad = False
    """Whether nothing before the first layer is trained, so that the first stage's gradient has to begin at its embeddings."""
    padding_token: int | None = None
    """The token whose embedding has no gradient where it is an input, as transformers builds it (padding_idx); as an output it has one."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackLayout | RowLayout,
        padding_mask: Tensor,
    ) -> Tensor:
        """Of one micro-batch of R rows of which S places are on this rank.

        Args:
            input_ids: [R, S] int64.
            position_ids: [R, S] int64.
            attention_mask: of no use here.
            packed_seq_params: who sees whom.
            padding_mask: [R, S] bool.

        Returns:
            [S, R, D], or what sequence parallelism leaves of it here.
        """
        angles = position_ids.t().float()[..., None] * self.rotary_frequencies.to(
            position_ids.device
        )
        has_router_loss = self.config.num_moe_experts and (
            self.config.moe_aux_loss_coeff or self.config.moe_z_loss_coeff
        )
        hidden: Tensor = self.decoder(
            hidden_states=self._embedded(input_ids, position_ids) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], dim=-1)[:, :, None],
            packed_seq_params=packed_seq_params,
            padding_mask=self._own_part(padding_mask) if has_router_loss else None,
        )
        return hidden

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        found: Tensor = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.inputs_require_grad and torch.is_grad_enabled():
            return found.requires_grad_()
        if self.padding_token is not None and found.requires_grad:
            is_padding = self._own_part(input_ids == self.padding_token).t()[..., None]
            found.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0.0))
        return found

    def _own_part(self, mask: Tensor) -> Tensor:
        """[R, S] or what sequence parallelism leaves of it here."""
        if not self.config.sequence_parallel:
            return mask
        tp: dist.ProcessGroup = self.pg_collection.tp
        return mask.chunk(tp.size(), dim=1)[tp.rank()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChunks:
    """What one rank holds of the model."""

    bare: tuple[PackedGPTModel, ...]
    """One per virtual stage, in their order."""
    wrapped: tuple[nn.Module, ...]
    """The same as Megatron's schedules and optimizers want them."""
    settings: Any
    """Megatron's configuration, shared by all chunks."""
    head: OutputHead | None
    """On the last stage."""


def build_chunks(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: BridgeTranslation,
    membership: Membership,
    adapter: AdapterPlacement | None,
) -> ModelChunks:
    """Build this rank's chunks; weights are whatever Megatron initialises, to be replaced."""
    settings = translation.settings
    is_language_model = config.model.model_type == "language_model"
    _fill(settings, config, hf_config=hf_config, is_language_model=is_language_model)
    frequencies = _rotary_frequencies(hf_config)
    num_chunks = config.virtual_pipeline or 1
    bare = tuple(
        _build_chunk(settings, stage=stage, num_chunks=num_chunks, membership=membership)
        for stage in range(num_chunks)
    )
    for chunk in bare:
        chunk.rotary_frequencies = frequencies
        chunk.padding_token = _padding_token(hf_config)
        if chunk.post_process and not is_language_model:
            chunk.output_layer = _scalar_head(settings, device=membership.device)
        if adapter is not None:
            adapter.enter(chunk, settings=settings)
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.to(membership.device)
    wrapped: tuple[nn.Module, ...] = bare
    if settings.params_dtype is not torch.float32:
        wrapped = tuple(Float16Module(settings, chunk) for chunk in bare)
    if config.optimizer is not None:
        wrapped = tuple(
            _wrap(chunk, settings, config, membership, is_first=i == 0)
            for i, chunk in enumerate(wrapped)
        )
    trained = None if adapter is None else adapter.head
    head = _head_of(
        bare[-1], config, vocabulary=hf_config.vocab_size, membership=membership, trained=trained
    )
    return ModelChunks(bare=bare, wrapped=wrapped, settings=settings, head=head)


def _fill(
    settings: Any, config: MegatronConfig, *, hf_config: PretrainedConfig, is_language_model: bool
) -> None:
    """Everything about the run that the bridge could not know, and every switch whose default gives wrong numbers here."""
    dtype = _DTYPES[config.precision.compute]
    share = -(-hf_config.vocab_size // config.tensor_parallel)
    if share * (config.tensor_parallel - 1) >= hf_config.vocab_size:
        raise ConfigError(
            f"tensor_parallel is {config.tensor_parallel}, which leaves a rank without any of the {hf_config.vocab_size} words: lower it."
        )
    check_divisible_sizes(settings, config)
    wanted = {
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline,
        "context_parallel_size": config.context_parallel,
        "sequence_parallel": config.sequence_parallel,
        "pipeline_model_parallel_layout": _stage_table(config, num_layers=settings.num_layers),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "vocab_size": share * config.tensor_parallel,
        "share_embeddings_and_output_weights": is_language_model
        and bool(hf_config.tie_word_embeddings),
        # It marks split parameters only where it initialises them; without the marks the gradient norm leaves parts out.
        "perform_initialization": True,
        "use_cpu_initialization": True,
        # Every weight is replaced before it is read.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        # The objective's reduction is the only division.
        "calculate_per_token_loss": True,
        # Packs differ in length.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # gloo may still be sending what would be freed; without CUDA there is nothing to gain.
        "deallocate_pipeline_outputs": False,
        "overlap_p2p_comm": config.virtual_pipeline is not None,
        "batch_p2p_comm": config.virtual_pipeline is None,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "deterministic_mode": False,
    }
    wanted |= _RECOMPUTE[config.recompute]
    if settings.num_moe_experts:
        wanted |= _of_experts(settings, config, hf_config=hf_config)
    elif config.expert_parallel > 1:
        raise ConfigError(
            f"expert_parallel is {config.expert_parallel}, but the model has no experts to divide: set it to 1."
        )
    else:
        _refuse_router_losses(config)
    for name, value in (wanted | plain(config.override_transformer_config)).items():
        setattr(settings, name, value)
    _refuse_unsupported(settings, hf_config)
    try:
        settings.finalize()
    except (ValueError, AssertionError) as error:
        if not config.override_transformer_config:
            raise
        given = dict(config.override_transformer_config)
        raise ConfigError(
            f"megatron-core refuses override_transformer_config {given} beside the rest: {error}"
        ) from error


def _refuse_router_losses(config: MegatronConfig) -> None:
    for name in ("router_aux_loss", "router_z_loss"):
        if getattr(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)}, but the model has no experts whose router would have a loss: set it to 0."
            )


def check_divisible_sizes(settings: Any, config: MegatronConfig) -> None:
    """Refuse sizes that leave the parts of a layer unequal; ranks may share a key head.

    Raises:
        ConfigError: naming the field and what it must divide.
    """
    heads, groups = (
        settings.num_attention_heads,
        settings.num_query_groups or settings.num_attention_heads,
    )
    parts = [("tensor_parallel", config.tensor_parallel, heads, "the model's {} attention heads")]
    if config.tensor_parallel % groups:
        parts.append(
            ("tensor_parallel", config.tensor_parallel, groups, "the model's {} key heads")
        )
    if settings.num_moe_experts:
        size = config.expert_ranks_of_a_matrix
        parts.append(
            (
                "expert_tensor_parallel",
                size,
                settings.moe_ffn_hidden_size,
                "the {} rows of an expert's matrices",
            )
        )
    else:
        parts.append(
            (
                "tensor_parallel",
                config.tensor_parallel,
                settings.ffn_hidden_size,
                "the {} rows of an MLP's matrices",
            )
        )
    for name, size, whole, what in parts:
        if whole % size:
            raise ConfigError(
                f"{name} is {size}, which must divide {what.format(whole)}: choose another."
            )


def _of_experts(
    settings: Any, config: MegatronConfig, *, hf_config: PretrainedConfig
) -> dict[str, object]:
    """What a mixture of experts needs beyond that.

    Raises:
        CapabilityError: some of its layers have none.
        ConfigError: its experts can't be divided like that.
    """
    fields = hf_config.to_dict()
    if fields.get("decoder_sparse_step", 1) != 1 or fields.get("mlp_only_layers"):
        raise CapabilityError(
            "models in which only some layers have experts are not supported by the Megatron engine yet."
        )
    if settings.num_moe_experts % config.expert_parallel:
        raise ConfigError(
            f"expert_parallel is {config.expert_parallel}, which must divide the {settings.num_moe_experts} experts of a layer."
        )
    if config.tensor_parallel > 1 and not config.sequence_parallel:
        raise ConfigError(
            "a mixture of experts with tensor_parallel above 1 would send each token to its experts once per rank: set sequence_parallel."
        )
    return {
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": config.expert_ranks_of_a_matrix,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": config.router_aux_loss,
        "moe_z_loss_coeff": config.router_z_loss or None,
        # Probabilities over all experts, of which the chosen ones are kept as they are, or over the chosen ones alone.
        "moe_router_pre_softmax": not fields.get("norm_topk_prob", True),
    }


def _leave(weight: Tensor) -> Tensor:
    return weight


def _refuse_unsupported(settings: Any, hf_config: PretrainedConfig) -> None:
    if settings.normalization != "RMSNorm":
        raise CapabilityError(
            f"{settings.normalization} is not supported by the Megatron engine yet: use a model with RMSNorm."
        )
    if settings.attention_dropout or settings.hidden_dropout:
        raise CapabilityError(
            "the model asks for dropout, which the Megatron engine's attention does not have: set it to 0 in its config."
        )
    fields = hf_config.to_dict()
    # Some configurations have a switch, others just a window.
    if fields.get("use_sliding_window", fields.get("sliding_window") is not None):
        raise CapabilityError(
            "sliding-window attention is not supported by the Megatron engine yet: where no sequence is longer than the window, set "
            "sliding_window to null in the model's config (and use_sliding_window to false, where there is one)."
        )


def _stage_table(config: MegatronConfig, *, num_layers: int) -> list[list[str]] | None:
    """Which chunk holds which layers, chunk c of all stages before chunk c + 1; any number of layers can be divided."""
    if config.pipeline_parallel == 1:
        return None
    count = config.pipeline_parallel * (config.virtual_pipeline or 1)
    sizes = config.layers_per_stage or [
        num_layers * (i + 1) // count - num_layers * i // count for i in range(count)
    ]
    if sum(sizes) != num_layers:
        raise ConfigError(
            f"layers_per_stage {list(sizes)} adds up to {sum(sizes)}, but the model has {num_layers} layers."
        )
    table = [["decoder"] * size for size in sizes]
    table[0].insert(0, "embedding")
    table[-1].append("loss")
    return table


def _padding_token(hf_config: PretrainedConfig) -> int | None:
    """A negative one counts from the end, as torch's padding_idx does."""
    found: int | None = hf_config.pad_token_id
    return found if found is None or found >= 0 else found + int(hf_config.vocab_size)


def _rotary_frequencies(hf_config: PretrainedConfig) -> Tensor:
    """[D / 2] float32 angles per position, as transformers computes them."""
    rotary = dict(hf_config.rope_parameters)
    kind = rotary.get("rope_type", "default")
    dim = (
        getattr(hf_config, "head_dim", None)
        or hf_config.hidden_size // hf_config.num_attention_heads
    )
    if kind == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return torch.reciprocal(torch.pow(float(rotary["rope_theta"]), exponents))
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"the model's rope_type is {kind!r}, which this version of transformers does not know."
        )
    frequencies: Tensor
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if scale != 1.0 or kind == "dynamic":
        raise CapabilityError(
            f"rope_type {kind!r} scales attention or depends on the length, which is not supported by the Megatron engine yet."
        )
    return frequencies


def _build_chunk(
    settings: Any, *, stage: int, num_chunks: int, membership: Membership
) -> PackedGPTModel:
    pp = membership.topology.pp
    table = settings.pipeline_model_parallel_layout
    num_layers = (
        settings.num_layers
        if table is None
        else len(table.layout[pp.rank][stage]) - _num_ends(table.layout[pp.rank][stage])
    )
    return PackedGPTModel(
        settings,
        transformer_layer_spec=build_block_spec(settings, num_layers=num_layers),
        vocab_size=settings.vocab_size,
        max_sequence_length=settings.seq_length,
        pre_process=pp.rank == 0 and stage == 0,
        post_process=membership.is_last_stage and stage == num_chunks - 1,
        share_embeddings_and_output_weights=settings.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=settings.rotary_base,
        pg_collection=membership.collection,
        vp_stage=stage if num_chunks > 1 else None,
    )


def _num_ends(row: Sequence[Any]) -> int:
    return sum(entry.name in ("embedding", "loss") for entry in row)


def _scalar_head(settings: Any, *, device: torch.device) -> nn.Linear:
    """Replicated over tensor-parallel ranks, all of which see the same hidden states."""
    return nn.Linear(settings.hidden_size, 1, dtype=settings.params_dtype, device=device)


def _wrap(
    chunk: nn.Module,
    settings: Any,
    config: MegatronConfig,
    membership: Membership,
    *,
    is_first: bool,
) -> nn.Module:
    wrapped: nn.Module = DistributedDataParallel(
        config=settings,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=config.distributed_optimizer,
            check_for_nan_in_grad=False,
            **plain(config.override_ddp_config),
        ),
        module=chunk,
        disable_bucketing=not is_first,
        pg_collection=membership.collection,
    )
    return wrapped


def _head_of(
    last: PackedGPTModel,
    config: MegatronConfig,
    *,
    vocabulary: int,
    membership: Membership,
    trained: TrainedHead | None,
) -> OutputHead | None:
    if not last.post_process:
        return None
    scalar = SCALAR_OUTPUTS.get(config.model.model_type)
    is_shared = scalar is None and last.share_embeddings_and_output_weights
    return OutputHead(
        projection=last.shared_embedding_or_output_weight()
        if is_shared
        else last.output_layer.weight,
        bias=None if scalar is None else last.output_layer.bias,
        scalar=scalar,
        trained=trained,
        vocabulary=vocabulary,
        chunk=config.head_chunk_tokens,
        is_compiled=config.compile_head,
        fills_chunks=config.deterministic,
        tp=membership.tp,
        cp=membership.cp,
    )
