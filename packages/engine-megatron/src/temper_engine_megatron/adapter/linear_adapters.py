"""LoRA for Megatron's parallel linear layers, one pair of A and B per Hugging Face module.

With layer input x the output is y + s B A x. With DoRA (arXiv:2402.09353, equation 5) the rows of
W + s B A are scaled to a trained norm m. Over tensor-parallel ranks A or B is split like its side
of the matrix, and the other one is replicated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from temper_engine_megatron.huggingface.weight_names import ADAPTER_MODULE, MIXER


class AdapterSwitch:
    """Turns the adapter of a model on and off."""

    is_off = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Settings shared by all layers of an adapter."""

    rank: int
    scale: float
    """The update's factor s."""
    dropout: float
    """Dropout probability of x in training."""
    dora: bool
    """Train the norms of rows as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Process groups and random generators for the layers on one rank."""

    tp: dist.ProcessGroup
    """Ranks with shards of the same matrices."""
    expert_tp: dist.ProcessGroup
    """Ranks with shards of the same expert's matrices."""
    is_sequence_parallel: bool
    """True if activations between matrices are split along the sequence."""
    switch: AdapterSwitch
    shared_generator: torch.Generator
    """Dropout generator where tensor-parallel ranks have the same x; equal on all of them."""
    rank_generator: torch.Generator
    """Dropout generator where tensor-parallel ranks have different slices of x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """One of Megatron's parallel linear layers on this rank."""

    module: nn.Module
    """Column or row parallel; returns its output and a bias or None."""
    splits_input: bool
    """True for row-parallel layers, which split x across ranks and sum the outputs."""
    is_replicated: bool
    """True for layers of torch, which every rank has in full and for the full sequence."""
    output_indices: Mapping[str, Tensor]
    """Indices into this rank's output, by the last part of the Hugging Face module's name.

    They are ordered like the rows of that module's weight."""

    @property
    def weight(self) -> Tensor:
        """[out, in] of this rank."""
        return self.module.get_parameter("weight")

    @property
    def added_bias(self) -> Tensor | None:
        """Bias [out] if `forward` adds it to the output, else None.

        A row-parallel layer does not add its bias, but returns it next to the output.
        """
        return (
            None
            if self.splits_input
            else dict(self.module.named_parameters(recurse=False)).get("bias")
        )


class LoraPair(nn.Module):
    """This rank's shards of A, B and (with DoRA) row norms for one Hugging Face module."""

    def __init__(
        self,
        linear: LinearLayer,
        *,
        num_rows: int,
        settings: LoraSettings,
        is_sequence_parallel: bool,
    ) -> None:
        super().__init__()
        weight = linear.weight
        self.lora_A = nn.Parameter(weight.new_empty(settings.rank, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_empty(num_rows, settings.rank))
        self.lora_magnitude_vector = (
            nn.Parameter(weight.new_empty(num_rows)) if settings.dora else None
        )
        split, replicated = (
            (self.lora_A, self.lora_B) if linear.splits_input else (self.lora_B, self.lora_A)
        )
        if linear.is_replicated:
            return
        set_tensor_model_parallel_attributes(split, True, 1 if linear.splits_input else 0, 1)
        # Each rank sees a part of the sequence; Megatron sums the gradients of parameters with this
        # mark over tensor-parallel ranks.
        replicated.sequence_parallel = is_sequence_parallel  # type: ignore[attr-defined]
        if self.lora_magnitude_vector is not None:
            if linear.splits_input:
                self.lora_magnitude_vector.sequence_parallel = is_sequence_parallel  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(self.lora_magnitude_vector, True, 0, 1)


class LinearAdapter(nn.Module):
    """Adds the low-rank updates to the output of one linear layer, as a forward hook."""

    def __init__(
        self,
        linear: LinearLayer,
        *,
        targets: tuple[str, ...],
        settings: LoraSettings,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._linear, self._settings, self._context = linear, settings, context
        self._targets = targets
        for name in targets:
            pair = LoraPair(
                linear,
                num_rows=len(linear.output_indices[name]),
                settings=settings,
                is_sequence_parallel=context.is_sequence_parallel,
            )
            self.add_module(name, pair)
        # Permutes outputs from module after module to the layer's interleaved order.
        output_permutation = torch.argsort(torch.cat([*linear.output_indices.values()]))
        self.register_buffer("output_permutation", output_permutation, persistent=False)

    def hook(
        self,
        _: nn.Module,
        inputs: tuple[Tensor, ...],
        output: Tensor | tuple[Tensor, Tensor | None],
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Forward hook: return the layer's output plus the adapter's low-rank updates."""
        if self._context.switch.is_off:
            return output
        if isinstance(output, Tensor):
            return self._add_updates(inputs[0], output)
        y, bias = output
        return self._add_updates(inputs[0], y), bias

    def _add_updates(self, x: Tensor, y: Tensor) -> Tensor:
        updates = [self._compute_update(name, x, y) for name in self._linear.output_indices]
        return y + torch.cat(updates, dim=-1).index_select(
            -1, self.get_buffer("output_permutation")
        )

    def get_pair(self, name: str) -> LoraPair:
        """Return the pair of one Hugging Face module."""
        pair = self.get_submodule(name)
        assert isinstance(pair, LoraPair)
        return pair

    def _compute_update(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        output_indices = self._linear.output_indices[name]
        if name not in self._targets:
            return y.new_zeros(*y.shape[:-1], len(output_indices))
        pair, settings = self.get_pair(name), self._settings
        low_rank = self._exchange(nn.functional.linear(self._apply_dropout(x), pair.lora_A))
        update = nn.functional.linear(low_rank, pair.lora_B) * settings.scale
        if pair.lora_magnitude_vector is None:
            return update
        # DoRA scales W x + s B A x without the bias.
        base = y.index_select(-1, output_indices.to(y.device))
        if self._linear.added_bias is not None:
            base = base - self._linear.added_bias.index_select(0, output_indices.to(y.device))
        ratio = (pair.lora_magnitude_vector.float() / self.row_norms(name)).to(y.dtype)
        # The layer has already returned W x, so this is the difference to DoRA's output.
        return (ratio - 1) * base + ratio * update

    def _exchange(self, low_rank: Tensor) -> Tensor:
        """Exchange A x between tensor-parallel ranks, as Megatron does around its matrices.

        A row-parallel layer has a slice of x on each rank, so the result is summed across ranks. A
        column-parallel layer needs the complete A x on every rank, and sums its gradient across
        ranks.
        """
        tp = self._context.tp
        if tp.size() == 1 or self._linear.is_replicated:
            return low_rank
        is_sequence_parallel = self._context.is_sequence_parallel
        exchange: Callable[..., Tensor]
        if self._linear.splits_input:
            exchange = (
                reduce_scatter_to_sequence_parallel_region
                if is_sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        else:
            exchange = (
                gather_from_sequence_parallel_region
                if is_sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
        return exchange(low_rank, group=tp)

    def _apply_dropout(self, x: Tensor) -> Tensor:
        keep_probability = 1.0 - self._settings.dropout
        if keep_probability == 1.0 or not self.training:
            return x
        # Ranks with the same x must draw the same mask, ranks with different slices another one.
        has_full_x = self._linear.is_replicated or not (
            self._linear.splits_input or self._context.is_sequence_parallel
        )
        generator = self._context.shared_generator if has_full_x else self._context.rank_generator
        mask = torch.empty_like(x).bernoulli_(keep_probability, generator=generator)
        return x * mask / keep_probability

    @torch.no_grad()
    def row_norms(self, name: str) -> Tensor:
        """Return the [rows] float32 row norms of W + s B A.

        The norm has no gradient, as in equation 11 of DoRA (arXiv:2402.09353). Collective if x is
        split.
        """
        pair, output_indices = (
            self.get_pair(name),
            self._linear.output_indices[name].to(self._linear.weight.device),
        )
        weight = self._linear.weight.index_select(0, output_indices).float()
        squared_norms = (
            torch.addmm(
                weight, pair.lora_B.float(), pair.lora_A.float(), alpha=self._settings.scale
            )
            .square()
            .sum(1)
        )
        # Each rank has some columns of every row: squares can be summed across ranks, norms cannot.
        if self._linear.splits_input and self._context.tp.size() > 1:
            dist.all_reduce(squared_norms, group=self._context.tp)
        return squared_norms.sqrt()


def attach_to_linear(
    linear: LinearLayer, *, targets: tuple[str, ...], settings: LoraSettings, context: LayerContext
) -> LinearAdapter:
    """Attach an adapter to a linear layer; its parameters become part of the layer."""
    adapter = LinearAdapter(linear, targets=targets, settings=settings, context=context)
    linear.module.add_module(ADAPTER_MODULE, adapter)
    linear.module.register_forward_hook(adapter.hook)
    return adapter


def find_linear_layers(
    layer: nn.Module,
    *,
    transformer_config: object,
    tp_size: int,
    paths: Mapping[str, tuple[str, ...]],
) -> dict[str, LinearLayer]:
    """Return the linear layers of one decoder layer by path.

    Args:
        layer: Decoder layer.
        transformer_config: Megatron's transformer config.
        tp_size: Number of tensor-parallel ranks.
        paths: Last parts of the Hugging Face modules in each linear layer, in the order of its
            weight mapping.
    """
    linear_layers = {}
    for path, names in paths.items():
        linear = layer.get_submodule(path)
        is_row_parallel = path.endswith(("linear_proj", "linear_fc2"))
        is_replicated = path.startswith(MIXER)
        size = linear.get_parameter("weight").shape[0]
        if len(names) == 3:
            output_indices = _qkv_rows(transformer_config, tp_size=tp_size)
        else:
            output_indices = list(torch.arange(size).chunk(len(names)))
        linear_layers[path] = LinearLayer(
            module=linear,
            splits_input=is_row_parallel,
            is_replicated=is_replicated,
            output_indices=dict(zip(names, output_indices, strict=True)),
        )
    return linear_layers


def _qkv_rows(transformer_config: object, *, tp_size: int) -> list[Tensor]:
    """Return the rows of query, key and value in this rank's interleaved output.

    Each group has its queries, then their gates if there are any, then its key and its value. The
    rows of a gate follow those of its query in the Hugging Face module.
    """
    values = vars(transformer_config)
    width, num_groups = int(values["kv_channels"]), int(values["num_query_groups"]) // tp_size
    queries_per_group = int(values["num_attention_heads"]) // int(values["num_query_groups"])
    parts_per_query = 2 if values["attention_output_gate"] else 1
    num_parts = queries_per_group * parts_per_query
    index = torch.arange(num_groups * (num_parts + 2) * width).view(
        num_groups, num_parts + 2, width
    )
    queries = index[:, :num_parts].unflatten(1, (parts_per_query, queries_per_group))
    return [
        queries.transpose(1, 2).reshape(-1),
        index[:, num_parts].reshape(-1),
        index[:, num_parts + 1].reshape(-1),
    ]
