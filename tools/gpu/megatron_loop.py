"""A bare megatron-core training loop for one architecture, to compare MegatronEngine with.

Uses Megatron's GPTModel, vocabulary-parallel cross-entropy, schedules, data-parallel wrapper and
optimizer. Torch's variable-length attention replaces Megatron's, which does not support packed
sequences without TransformerEngine. Computes no log-probs, no entropy and no objective.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_NEEDS_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


class _VarlenAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Causal attention within each sequence of a pack."""

    def __init__(self, config: Any, *_: object, **__: object) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: object,
    ) -> Tensor:
        # `pack_of` stores the longest length in this field, which Megatron does not read here.
        starts, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.local_cp_size
        q, k, v = (x[:, 0].contiguous() for x in (query, key, value))
        flags: dict[str, Any] = {"enable_gqa": True} if _NEEDS_FLAG else {}
        mixed = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **flags)
        assert isinstance(mixed, Tensor)
        return mixed.flatten(1)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One packed micro-batch."""

    tokens: Tensor
    layout: PackedSeqParams
    """Sequence starts; `local_cp_size` carries the longest length, because it is unused here."""


def make_pack(tokens: Tensor, sizes: Sequence[int]) -> Pack:
    """Pack tokens of sequences with these lengths into one micro-batch."""
    starts = torch.tensor([0, *sizes]).cumsum(0).to(tokens.device, torch.int32)
    num_tokens = tokens.shape[0]
    layout = PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=num_tokens,
        max_seqlen_kv=num_tokens,
        local_cp_size=max(sizes),
    )
    return Pack(tokens=tokens, layout=layout)


class BareLoop:
    """One rank of the loop.

    Needs a default process group; creates Megatron's groups, which must not exist yet.
    """

    def __init__(
        self, shape: Mapping[str, int], *, tensor: int, pipeline: int, max_tokens: int
    ) -> None:
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)
        config = _make_transformer_config(shape, tensor=tensor, pipeline=pipeline)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = _VarlenAttention
        model = GPTModel(
            config,
            transformer_layer_spec=spec,
            vocab_size=shape["vocab_size"],
            max_sequence_length=max_tokens,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            rotary_base=1000000,
        ).cuda()
        self._max_tokens = max_tokens
        wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self._model = DistributedDataParallel(config, wrapping, Float16Module(config, model))
        optimizing = OptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
        )
        self._optimizer = get_megatron_optimizer(
            optimizing, [self._model], use_gloo_process_groups=False
        )

    def update(self, packs: Sequence[Pack]) -> float:
        """Run one update over these micro-batches and return the gradient norm."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(packs),
            model=self._model,
            num_microbatches=len(packs),
            seq_length=self._max_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = self._optimizer.step()
        return float(norm)

    def close(self) -> None:
        """Destroy Megatron's process groups and free memory."""
        del self._model, self._optimizer
        parallel_state.destroy_model_parallel()
        torch.cuda.empty_cache()


def _make_transformer_config(
    shape: Mapping[str, int], *, tensor: int, pipeline: int
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        ffn_hidden_size=shape["intermediate_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def _forward_step(packs: Iterator[Pack], model: Any) -> tuple[Tensor, object]:
    pack = next(packs)
    positions = torch.arange(pack.tokens.shape[0], device=pack.tokens.device)
    labels = torch.roll(pack.tokens, -1)
    output: Tensor = model(
        input_ids=pack.tokens[None],
        position_ids=positions[None],
        attention_mask=None,
        labels=labels[None],
        packed_seq_params=pack.layout,
    )
    return output, lambda losses: (
        losses.sum(),
        torch.tensor(pack.tokens.shape[0], dtype=torch.int, device="cuda"),
        {},
    )
