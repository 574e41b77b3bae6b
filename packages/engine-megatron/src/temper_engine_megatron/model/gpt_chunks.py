"""The model chunks of one rank: Megatron's GPTModel over packed tokens, ending in hidden states.

A rank has one chunk per virtual pipeline stage. With an optimizer each is wrapped in Megatron's
DistributedDataParallel.
"""

from collections.abc import Sequence
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

from temper_engine_api.objective import HeadOutput
from temper_engine_megatron.adapter.adapter_placement import AdapterPlacement, TrainedHead
from temper_engine_megatron.bridge_compat import BridgeTranslation
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.huggingface.huggingface_model import find_padding_token
from temper_engine_megatron.model.config_overrides import to_megatron_values
from temper_engine_megatron.model.latent_attention import set_rotary_scale
from temper_engine_megatron.model.layer_spec import build_block_spec
from temper_engine_megatron.model.moe_router import keep_float32_biases
from temper_engine_megatron.model.output_head import OutputHead
from temper_engine_megatron.model.packed_attention import PackLayout, RowLayout
from temper_engine_megatron.model.rotary_frequencies import compute_rotary_frequencies
from temper_engine_megatron.model.transformer_settings import configure_transformer
from temper_engine_megatron.runtime.process_groups import Membership

SCALAR_OUTPUTS = {"value_model": HeadOutput.VALUE, "reward_model": HeadOutput.SCORE}


class PackedGPTModel(GPTModel):
    """A chunk of the decoder that takes its positions as input and returns hidden states."""

    rotary_frequencies: Tensor
    """[D / 2] float32 angles per position; [kinds, D / 2] if layers of different kinds differ."""
    embedding_scale: float | None = None
    """Factor of the embeddings of tokens."""
    inputs_require_grad = False
    """True if no parameter before the first layer is trained.

    Pipeline schedules and recomputation need a gradient at the embeddings then."""
    padding_token: int | None = None
    """Token whose input embedding gets no gradient, like `padding_idx` in transformers.

    As a row of a tied output embedding it does get one."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackLayout | RowLayout,
    ) -> Tensor:
        """Compute the hidden states of one micro-batch with R rows and S positions on this rank.

        Args:
            input_ids: [R, S] int64.
            position_ids: [R, S] int64.
            attention_mask: Unused; Megatron passes None.
            packed_seq_params: Sequence boundaries.

        Returns:
            [S, R, D], or this rank's slice of S under sequence parallelism.
        """
        # Take the angles from the position ids. Megatron would number positions through the full
        # pack, and order the positions of a context-parallel rank by its own slices.
        frequencies = self.rotary_frequencies.to(position_ids.device)
        # [S, R, D / 2], or [kinds, S, R, D / 2].
        angles = position_ids.t().float()[..., None] * frequencies[..., None, None, :]
        hidden: Tensor = self.decoder(
            hidden_states=self._embed(input_ids, position_ids) if self.pre_process else None,
            attention_mask=None,
            # Repeat the angles, because the two halves of a head's dimensions rotate together, as
            # in transformers.
            rotary_pos_emb=torch.cat([angles, angles], dim=-1).unsqueeze(-2),
            # Routers read the padding from these parameters. No `padding_mask` is passed, because
            # routers with biases fail with it in megatron-core 0.16, which combines a mask [T] with
            # choices [T, E].
            packed_seq_params=packed_seq_params,
        )
        return hidden

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.embedding_scale is not None:
            # Rounded like the weights, as in transformers.
            embedded = embedded * torch.tensor(self.embedding_scale).to(embedded)
        if self.inputs_require_grad and torch.is_grad_enabled():
            return embedded.requires_grad_()
        if self.padding_token is not None and embedded.requires_grad:
            # A hook, because Megatron's VocabParallelEmbedding has no `padding_idx`.
            is_padding = self._take_sequence_shard(input_ids == self.padding_token).t()[..., None]
            embedded.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0.0))
        return embedded

    def _take_sequence_shard(self, mask: Tensor) -> Tensor:
        """Return [R, S], or this rank's slice of S under sequence parallelism."""
        if not self.config.sequence_parallel:
            return mask
        tp: dist.ProcessGroup = self.pg_collection.tp
        return mask.chunk(tp.size(), dim=1)[tp.rank()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChunks:
    """This rank's part of the model."""

    unwrapped: tuple[PackedGPTModel, ...]
    """One chunk per virtual pipeline stage, in order."""
    wrapped: tuple[nn.Module, ...]
    """The same chunks in the wrappers that Megatron's schedules and optimizers expect."""
    transformer_config: Any
    """Megatron's transformer config, shared by all chunks."""
    head: OutputHead | None
    """None except on the last stage."""

    def release(self) -> None:
        """Take the model out of its wrappers, so that its memory is freed.

        Layers of experts keep outputs of their last pass, whose autograd graphs refer to hooks of
        the wrapper, which refers to the layers. The garbage collector does not follow autograd
        graphs, so it never finds this cycle.
        """
        for chunk in self.wrapped:
            for name, _ in tuple(chunk.named_children()):
                delattr(chunk, name)


def build_chunks(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: BridgeTranslation,
    membership: Membership,
    adapter: AdapterPlacement | None,
) -> ModelChunks:
    """Build this rank's chunks with uninitialized weights."""
    transformer_config = translation.transformer_config
    is_language_model = config.model.model_type == "language_model"
    configure_transformer(
        transformer_config, config, hf_config=hf_config, is_language_model=is_language_model
    )
    # Computed here: Megatron reads only part of the rope settings. It takes the default base for
    # transformers 5 configs, and a fixed original length for every Llama 3.
    frequencies, rotary_scale = compute_rotary_frequencies(hf_config)
    padding_token = find_padding_token(config.model, hf_config)
    num_chunks = config.virtual_pipeline or 1
    unwrapped = tuple(
        _build_chunk(
            transformer_config,
            index=i,
            num_chunks=num_chunks,
            membership=membership,
            groups_experts=config.expert_products != "sequential",
            uses_transformer_engine=config.layers == "transformer_engine",
        )
        for i in range(num_chunks)
    )
    for chunk in unwrapped:
        chunk.rotary_frequencies = frequencies
        chunk.embedding_scale = transformer_config.embedding_scale
        if transformer_config.multi_latent_attention:
            set_rotary_scale(
                chunk.decoder.layers,
                scale=rotary_scale,
                is_interleaved=bool(hf_config.to_dict().get("rope_interleave", True)),
            )
        chunk.padding_token = padding_token
        if chunk.post_process and not is_language_model:
            chunk.output_layer = _build_scalar_head(transformer_config, device=membership.device)
        if adapter is not None:
            adapter.attach(chunk, transformer_config=transformer_config)
        # Plain torch modules lack the marks that Megatron's gradient norm uses to tell split
        # parameters from replicated ones.
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.to(membership.device)
    wrapped: tuple[nn.Module, ...] = unwrapped
    if transformer_config.params_dtype is not torch.float32:
        # Casts the parameters, and the output of the last stage back to float32.
        wrapped = tuple(Float16Module(transformer_config, chunk) for chunk in unwrapped)
        keep_float32_biases(unwrapped)
    if config.optimizer is not None:
        wrapped = tuple(
            _wrap_data_parallel(chunk, transformer_config, config, membership, is_first=i == 0)
            for i, chunk in enumerate(wrapped)
        )
    head = _build_head(
        unwrapped[-1],
        config,
        vocab_size=hf_config.vocab_size,
        membership=membership,
        trained_head=None if adapter is None else adapter.head,
    )
    return ModelChunks(
        unwrapped=unwrapped, wrapped=wrapped, transformer_config=transformer_config, head=head
    )


def _build_chunk(
    transformer_config: Any,
    *,
    index: int,
    num_chunks: int,
    membership: Membership,
    groups_experts: bool,
    uses_transformer_engine: bool,
) -> PackedGPTModel:
    pp = membership.topology.pp
    return PackedGPTModel(
        transformer_config,
        transformer_layer_spec=build_block_spec(
            transformer_config,
            layers=_list_layers(transformer_config, stage=pp.rank, index=index),
            groups_experts=groups_experts,
            uses_transformer_engine=uses_transformer_engine,
        ),
        vocab_size=transformer_config.vocab_size,
        max_sequence_length=transformer_config.seq_length,
        pre_process=pp.rank == 0 and index == 0,
        post_process=membership.is_last_stage and index == num_chunks - 1,
        share_embeddings_and_output_weights=transformer_config.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=transformer_config.rotary_base,
        pg_collection=membership.pg_collection,
        vp_stage=index if num_chunks > 1 else None,
    )


def _list_layers(transformer_config: Any, *, stage: int, index: int) -> range:
    """Return the numbers of the layers of a chunk, counted from 0."""
    layout = transformer_config.pipeline_model_parallel_layout
    if layout is None:
        return range(transformer_config.num_layers)
    # All stages for the first chunk, then all stages for the next one.
    sizes = [_count_decoder_layers(chunk) for column in zip(*layout.layout) for chunk in column]
    position = index * len(layout.layout) + stage
    first = sum(sizes[:position])
    return range(first, first + sizes[position])


def _count_decoder_layers(entries: Sequence[Any]) -> int:
    return sum(entry.name not in ("embedding", "loss") for entry in entries)


def _build_scalar_head(transformer_config: Any, *, device: torch.device) -> nn.Linear:
    """Build a head that is replicated over tensor-parallel ranks, which have the same inputs."""
    return nn.Linear(
        transformer_config.hidden_size, 1, dtype=transformer_config.params_dtype, device=device
    )


def _wrap_data_parallel(
    chunk: nn.Module,
    transformer_config: Any,
    config: MegatronConfig,
    membership: Membership,
    *,
    is_first: bool,
) -> nn.Module:
    wrapped: nn.Module = DistributedDataParallel(
        config=transformer_config,
        ddp_config=DistributedDataParallelConfig(
            # Gradients of many micro-batches are summed in this buffer, where bf16 loses digits.
            grad_reduce_in_fp32=True,
            # Gradients are reduced once per update, by the engine.
            overlap_grad_reduce=False,
            use_distributed_optimizer=config.distributed_optimizer,
            # A norm that is not finite skips the update instead of raising.
            check_for_nan_in_grad=False,
            **to_megatron_values(config.override_ddp_config),
        ),
        module=chunk,
        # Megatron's training script does the same, because the later chunks overlap with
        # computation anyway.
        disable_bucketing=not is_first,
        pg_collection=membership.pg_collection,
    )
    return wrapped


def _build_head(
    last: PackedGPTModel,
    config: MegatronConfig,
    *,
    vocab_size: int,
    membership: Membership,
    trained_head: TrainedHead | None,
) -> OutputHead | None:
    if not last.post_process:
        return None
    scalar_output = SCALAR_OUTPUTS.get(config.model.model_type)
    # A tied head uses the embedding, of which the last stage has its own copy in a pipeline.
    is_tied = scalar_output is None and last.share_embeddings_and_output_weights
    return OutputHead(
        weight=last.shared_embedding_or_output_weight() if is_tied else last.output_layer.weight,
        bias=None if scalar_output is None else last.output_layer.bias,
        scalar_output=scalar_output,
        trained_head=trained_head,
        vocab_size=vocab_size,
        chunk_size=config.head_chunk_tokens,
        uses_compile=config.compile_head,
        pads_chunks=config.deterministic,
        tp=membership.tp,
        cp=membership.cp,
    )
