"""Low-rank updates beside Megatron's split matrices, each for one of the Hugging Face modules that a matrix is made of.

With x the layer's input: y + s B A x, and with DoRA (arXiv:2402.09353, equation 5) rows of W + s B A scaled to a trained length m. Over
tensor-parallel ranks A or B is split as its side of the matrix is, and the other one is whole on each.
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

from temper_engine_megatron.huggingface.weight_names import ADAPTER_MODULE


class AdapterSwitch:
    """Whether the adapter takes part in what the model computes."""

    is_off = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """What all parts of an adapter share."""

    rank: int
    """Of A and B."""
    scale: float
    """s."""
    dropout: float
    """On x, in training."""
    dora: bool
    """Whether lengths of rows are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """Where a layer computes."""

    tp: dist.ProcessGroup
    """Ranks that hold parts of the same matrices."""
    expert_tp: dist.ProcessGroup
    """Ranks that hold parts of the same expert's matrices."""
    is_sequence_parallel: bool
    """Whether activations between matrices are split along the sequence."""
    switch: AdapterSwitch
    """Of the whole adapter."""
    shared_generator: torch.Generator
    """Of dropout where tensor-parallel ranks have the same x, in the same state on all of them."""
    rank_generator: torch.Generator
    """Of dropout where they have parts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """One of Megatron's linear layers on this rank."""

    layer: nn.Module
    """Column or row parallel; it returns its output and perhaps a bias."""
    splits_input: bool
    """Whether it is row parallel: x is split over ranks, and the output is their sum."""
    rows: Mapping[str, Tensor]
    """By the last part of Hugging Face's module name: which entries of this rank's output belong to it, in that module's order."""

    @property
    def weight(self) -> Tensor:
        """[out, in] of this rank."""
        return self.layer.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:
        """[out] that is already in the output; a row-parallel layer returns its own beside it."""
        return (
            None
            if self.splits_input
            else dict(self.layer.named_parameters(recurse=False)).get("bias")
        )


class LoraPair(nn.Module):
    """A and B of one Hugging Face module on this rank, and the lengths of its rows."""

    def __init__(
        self,
        host: LinearLayer,
        *,
        num_rows: int,
        settings: LoraSettings,
        is_sequence_parallel: bool,
    ) -> None:
        super().__init__()
        weight = host.weight
        self.lora_A = nn.Parameter(weight.new_empty(settings.rank, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_empty(num_rows, settings.rank))
        self.lora_magnitude_vector = (
            nn.Parameter(weight.new_empty(num_rows)) if settings.dora else None
        )
        split, whole = (
            (self.lora_A, self.lora_B) if host.splits_input else (self.lora_B, self.lora_A)
        )
        set_tensor_model_parallel_attributes(split, True, 1 if host.splits_input else 0, 1)
        # Every rank sees a part of the sequence, so that gradients of what is whole are summed over them.
        whole.sequence_parallel = is_sequence_parallel  # type: ignore[attr-defined]
        if self.lora_magnitude_vector is not None:
            if host.splits_input:
                self.lora_magnitude_vector.sequence_parallel = is_sequence_parallel  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(self.lora_magnitude_vector, True, 0, 1)


class LinearAdapter(nn.Module):
    """What an adapter adds to the output of one linear layer; a forward hook of that layer."""

    def __init__(
        self,
        host: LinearLayer,
        *,
        targets: tuple[str, ...],
        settings: LoraSettings,
        around: LayerContext,
    ) -> None:
        super().__init__()
        self._host, self._settings, self._around = host, settings, around
        self._targets = targets
        for name in targets:
            part = LoraPair(
                host,
                num_rows=len(host.rows[name]),
                settings=settings,
                is_sequence_parallel=around.is_sequence_parallel,
            )
            self.add_module(name, part)
        # From the order of Hugging Face's modules, one behind the other, to that of the layer's output.
        order = torch.argsort(torch.cat([*host.rows.values()]))
        self.register_buffer("order", order, persistent=False)

    def hook(
        self, _: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output with the adapter's on top."""
        if self._around.switch.is_off:
            return output
        y, bias = output
        pieces = [self._added(name, inputs[0], y) for name in self._host.rows]
        return y + torch.cat(pieces, dim=-1).index_select(-1, self.get_buffer("order")), bias

    def part(self, name: str) -> LoraPair:
        """Of one Hugging Face module."""
        found = self.get_submodule(name)
        assert isinstance(found, LoraPair)
        return found

    def _added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        rows = self._host.rows[name]
        if name not in self._targets:
            return y.new_zeros(*y.shape[:-1], len(rows))
        part, settings = self.part(name), self._settings
        low = self._across(nn.functional.linear(self._dropped(x), part.lora_A))
        added = nn.functional.linear(low, part.lora_B) * settings.scale
        if part.lora_magnitude_vector is None:
            return added
        base = y.index_select(-1, rows.to(y.device))
        if self._host.bias is not None:
            base = base - self._host.bias.index_select(0, rows.to(y.device))
        ratio = (part.lora_magnitude_vector.float() / self.lengths(name)).to(y.dtype)
        return (ratio - 1) * base + ratio * added

    def _across(self, low: Tensor) -> Tensor:
        """A x where the other matrix needs it: its sum over ranks that have parts of x, or a copy whose gradients are summed."""
        tp = self._around.tp
        if tp.size() == 1:
            return low
        is_sequence_parallel = self._around.is_sequence_parallel
        across: Callable[..., Tensor]
        if self._host.splits_input:
            across = (
                reduce_scatter_to_sequence_parallel_region
                if is_sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        else:
            across = (
                gather_from_sequence_parallel_region
                if is_sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
        return across(low, group=tp)

    def _dropped(self, x: Tensor) -> Tensor:
        share = 1.0 - self._settings.dropout
        if share == 1.0 or not self.training:
            return x
        is_whole = not self._host.splits_input and not self._around.is_sequence_parallel
        draws = self._around.shared_generator if is_whole else self._around.rank_generator
        return x * torch.empty_like(x).bernoulli_(share, generator=draws) / share

    @torch.no_grad()
    def lengths(self, name: str) -> Tensor:
        """[rows] float32 lengths of the rows of W + s B A, whole on every rank that holds them; a constant, as in equation 11."""
        part, rows = self.part(name), self._host.rows[name].to(self._host.weight.device)
        weight = self._host.weight.index_select(0, rows).float()
        square = (
            torch.addmm(
                weight, part.lora_B.float(), part.lora_A.float(), alpha=self._settings.scale
            )
            .square()
            .sum(1)
        )
        if self._host.splits_input and self._around.tp.size() > 1:
            dist.all_reduce(square, group=self._around.tp)
        return square.sqrt()


def attach_to_linear(
    host: LinearLayer, *, targets: tuple[str, ...], settings: LoraSettings, around: LayerContext
) -> LinearAdapter:
    """Put an adapter beside a layer; its parameters are part of the layer's from now on."""
    beside = LinearAdapter(host, targets=targets, settings=settings, around=around)
    host.layer.add_module(ADAPTER_MODULE, beside)
    host.layer.register_forward_hook(beside.hook)
    return beside


def find_linear_layers(
    layer: nn.Module, *, settings: object, tp_size: int, paths: Mapping[str, tuple[str, ...]]
) -> dict[str, LinearLayer]:
    """The linear layers of one decoder layer by their path, with the rows of the Hugging Face modules in them.

    Args:
        layer: a decoder layer.
        settings: Megatron's configuration.
        tp_size: tensor-parallel ranks.
        paths: by path, the last parts of Hugging Face's module names, in the order of that path's recipe.
    """
    found = {}
    for path, names in paths.items():
        linear = layer.get_submodule(path)
        is_row = path.endswith(("linear_proj", "linear_fc2"))
        size = linear.get_parameter("weight").shape[0]
        if len(names) == 3:
            rows = _attention_rows(settings, tp_size=tp_size)
        else:
            rows = list(torch.arange(size).chunk(len(names)))
        found[path] = LinearLayer(
            layer=linear, splits_input=is_row, rows=dict(zip(names, rows, strict=True))
        )
    return found


def _attention_rows(settings: object, *, tp_size: int) -> list[Tensor]:
    """Of query, key and value in this rank's interleaved output: for each group its queries, its key, its value."""
    values = vars(settings)
    width, num_groups = int(values["kv_channels"]), int(values["num_query_groups"]) // tp_size
    per_group = int(values["num_attention_heads"]) // int(values["num_query_groups"])
    place = torch.arange(num_groups * (per_group + 2) * width).view(
        num_groups, per_group + 2, width
    )
    return [
        place[:, :per_group].reshape(-1),
        place[:, per_group].reshape(-1),
        place[:, per_group + 1].reshape(-1),
    ]
