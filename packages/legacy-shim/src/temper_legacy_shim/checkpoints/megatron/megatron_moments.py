"""Moments of Megatron's distributed checkpoints, in model space or in buckets."""

import re
from collections.abc import Iterator, Mapping, Sequence

from temper_legacy_shim.checkpoints.adapters import peft_tensors
from temper_legacy_shim.checkpoints.files.archive import Archive
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor
from temper_legacy_shim.checkpoints.fsdp_moments import OldMoments, OldOptimizer, is_buffer
from temper_legacy_shim.checkpoints.megatron import parameter_names
from temper_legacy_shim.checkpoints.megatron.buckets import (
    FullStates,
    bucket_settings,
    read_buckets,
)
from temper_legacy_shim.checkpoints.megatron.flat_moments import KINDS, is_master
from temper_legacy_shim.checkpoints.megatron.parameter_names import Geometry
from temper_legacy_shim.checkpoints.megatron.weights import MARK, megatron_tensors, read_adapter
from temper_legacy_shim.checkpoints.model import OldModel
from temper_legacy_shim.errors import LayoutError

_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(?:module\.)*(.+)"
)
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


def read_megatron_optimizer(model: OldModel) -> OldOptimizer:
    """Return the moments under Hugging Face names.

    Raises:
        LayoutError: there are none in model space, or no file says how many updates were made; for
            the receipt.
        DamagedFileError: a file is damaged.
    """
    geometry = _geometry(model)
    kinds = _group_by_parameter(model) or _from_buckets(model, geometry)
    named = {
        kind: parameter_names.to_hf(kinds[kind], geometry, where=model.role.path) for kind in KINDS
    }
    check_masters(named["param"], model.weights)
    return _optimizer(model, named)


def check_masters(masters: Mapping[str, LazyTensor], weights: Mapping[str, LazyTensor]) -> None:
    """Check that an optimizer's masters round to the weights.

    Megatron's entries per parameter are shifted, and cut off at the end, if a buffer has several
    buckets with padding between them, as with embeddings that are tied over two stages: it counts
    the padding in one place and not in the other.

    Raises:
        LayoutError: naming the first that does not; for the receipt.
    """
    for name, master in masters.items():
        if name in weights and not is_master(master, weights[name]):
            raise LayoutError(
                f"the optimizer's float32 master of {name} does not round to the weight next to "
                "it: Megatron saves them shifted where tied "
                "embeddings or a bucket size divide its buffers, and moments with them"
            )


def read_megatron_adapter_optimizer(model: OldModel) -> OldOptimizer:
    """Return the moments of an adapter's halves under PEFT's names.

    The adapter of a fused matrix is divided among its projections: each takes its rows of B, and
    continues with a copy of A, which they shared.

    Raises:
        LayoutError: there are none, or no file says how many updates were made; for the receipt.
        DamagedFileError: a file is damaged.
    """
    geometry = _geometry(model)
    kinds = _group_by_parameter(model) or _from_buckets(model, geometry)

    def named(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        read = read_adapter(tensors, geometry, where=model.role.path, accepts_missing_layers=True)
        return peft_tensors(read)

    return _optimizer(model, {kind: named(kinds[kind]) if kinds[kind] else {} for kind in KINDS})


def _geometry(model: OldModel) -> Geometry:
    assert model.config is not None, "Megatron's weights were read with it"
    return Geometry.of(model.config, source="config.json")


def _group_by_parameter(model: OldModel) -> dict[str, dict[str, LazyTensor]]:
    """Return states in model space by kind and Megatron's name; empty without any."""
    kinds: dict[str, dict[str, LazyTensor]] = {}
    for folder in model.role.dist_folders:
        for name, tensor in DistCheckpoint(folder).tensors.items():
            match = _STATE.fullmatch(name)
            if match:
                kinds.setdefault(match[1], {})[match[2].replace(".to_wrap.", ".")] = tensor
    if "exp_avg" not in kinds or kinds["exp_avg"].keys() != kinds.get("exp_avg_sq", {}).keys():
        return {}
    kinds["param"] = kinds.get("fp32_param") or kinds.get("param") or {}
    # With float32 weights the optimizer has no masters of its own.
    if kinds["param"].keys() != kinds["exp_avg"].keys():
        kinds["param"] = {}
    return kinds


def _from_buckets(model: OldModel, geometry: Geometry) -> FullStates:
    """Read buckets, with the weights of the checkpoint or, since 0.7, of huggingface/."""
    where = model.role.path
    raw = megatron_tensors(model.role)
    trained = {
        name: tensor
        for name, tensor in raw.items()
        if (MARK in name) == (model.adapter is not None)
    }
    full = dict(parameter_names.unstacked(trained, geometry, where=where))
    are_exported = not full
    if are_exported:
        full = parameter_names.from_hf(model.weights, geometry)
    return read_buckets(
        model,
        {name: tensor for name, tensor in full.items() if not is_buffer(name)},
        geometry,
        are_exported=are_exported,
    )


def _optimizer(model: OldModel, named: FullStates) -> OldOptimizer:
    groups = [
        *_groups(model),
        *(group for value in bucket_settings(model) for group in _nested_groups(value)),
    ]
    counts = {count for group in groups if (count := _count(group.get("step"))) is not None}
    # Adam's bias correction depends on the count, so moments with a wrong count change the first
    # updates.
    if len(counts) != 1:
        raise LayoutError(
            f"common.pt says {sorted(counts) or 'nothing'} about the number of updates, without "
            "which moments mislead"
        )
    first, second, count = named["exp_avg"], named["exp_avg_sq"], counts.pop()
    return OldOptimizer(
        moments={
            name: OldMoments(first=first[name], second=second[name], update_count=count)
            for name in first
        },
        settings=_settings(groups),
        # Megatron's groups of norms and biases have a decay of 0.
        decays_vectors=False,
        masters=named["param"],
    )


def _count(step: object) -> int | None:
    """Return the number of updates, which torch's Adam stores as a float."""
    if isinstance(step, int) or (isinstance(step, float) and step.is_integer()):
        return int(step)
    return None


def _settings(groups: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the settings of the group that decays; vectors have one without decay."""
    decays = [
        float(decay) if isinstance(decay := group.get("weight_decay"), int | float) else 0.0
        for group in groups
    ]
    group = groups[decays.index(max(decays))]
    return {
        name: group[name]
        for name in _SETTINGS
        if isinstance(group.get(name), int | float | tuple | list)
    }


def _groups(model: OldModel) -> Iterator[Mapping[str, object]]:
    """Yield the parameter groups, wherever ``common.pt`` nests them."""
    for folder in model.role.dist_folders:
        path = folder / "common.pt"
        if path.is_file():
            yield from _nested_groups(Archive(path).value())


def _nested_groups(value: object) -> Iterator[Mapping[str, object]]:
    """Yield the parameter groups in nested mappings and lists, each visited once."""
    # A pickle can refer to one list from many places, so that a recursion would take exponential
    # time.
    waiting, seen = [value], set[int]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict | list) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, list):
            waiting += node
            continue
        groups = node.get("param_groups")
        if isinstance(groups, list):
            yield from (group for group in groups if isinstance(group, dict))
        waiting += node.values()
