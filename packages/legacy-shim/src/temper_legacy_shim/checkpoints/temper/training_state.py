"""Resumable state.

An old role becomes a step directory that an engine's ``load_checkpoint`` reads, or the portable
training state.

The step directory contains the FSDP engine's format: float32 master weights, both moments and
update counts under Hugging Face names, each rank's torch random-number state, and the counters of
updates and of the schedule. The same tensors, one parameter at a time, are the portable state
(``training_state``) that every engine's ``load_state`` takes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from temper_legacy_shim.checkpoints import rank_files
from temper_legacy_shim.checkpoints.adapters import PEFT_PREFIX, Adapter, merged
from temper_legacy_shim.checkpoints.files.dtypes import FLOAT32
from temper_legacy_shim.checkpoints.files.lazy import Cast, InMemory, LazyTensor, as_torch
from temper_legacy_shim.checkpoints.fsdp_moments import (
    OldMoments,
    OldOptimizer,
    is_buffer,
    read_optimizer,
    read_trained_leaves,
)
from temper_legacy_shim.checkpoints.huggingface.joined_experts import (
    joined,
    joined_counts,
    to_memory_name,
)
from temper_legacy_shim.checkpoints.megatron.flat_moments import (
    has_flat_optimizer,
    read_flat_optimizer,
)
from temper_legacy_shim.checkpoints.megatron.megatron_moments import (
    check_masters,
    read_megatron_adapter_optimizer,
    read_megatron_optimizer,
)
from temper_legacy_shim.checkpoints.model import CLASSIFIER, LANGUAGE_HEAD, OldModel
from temper_legacy_shim.checkpoints.rank_files import check_is_next_to_weights
from temper_legacy_shim.checkpoints.temper.dcp import Zeros
from temper_legacy_shim.checkpoints.temper.extra_state import OldExtra, read_extra
from temper_legacy_shim.errors import LayoutError, UsageError

if TYPE_CHECKING:
    from temper_engine_api.weights import TrainingState

_TRL_HEAD = {"v_head.summary.weight": "score.weight", "v_head.summary.bias": "score.bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableState:
    """Everything of an old role that training can continue from."""

    model: OldModel
    """Weights in float32 under the engine's names."""
    moments: Mapping[str, OldMoments]
    """Moments by the same names; empty if the old checkpoint has none that can be carried."""
    settings: Mapping[str, object]
    """Settings of the old optimizer's group."""
    decays_vectors: bool = True
    """True if that optimizer decayed vectors too."""
    extra: OldExtra
    """Schedule and random-number states."""
    carried: tuple[str, ...]
    not_carried: tuple[str, ...]

    @property
    def num_updates(self) -> int:
        """Updates the parameters have seen; 0 if no moments are carried."""
        return max((kept.update_count for kept in self.moments.values()), default=0)

    def tensors(self) -> dict[str, LazyTensor]:
        """Return tensors by kind and the engine's name; a mixture's experts are one tensor."""
        weights = self.model.weights
        trained = {name: tensor for name, tensor in weights.items() if not is_buffer(name)}
        buffers = {name: tensor for name, tensor in weights.items() if is_buffer(name)}
        result = {f"parameter.{name}": tensor for name, tensor in joined(trained).items()}
        result |= {f"buffer.{to_memory_name(name)}": tensor for name, tensor in buffers.items()}
        # Without old moments they begin at 0, as a new optimizer's do: an engine loads no step
        # directory without any.
        begin = trained if self.moments else joined(trained)
        # Parameters that were never updated also need moments, because the engine loads all or
        # none.
        first: dict[str, LazyTensor] = {name: Zeros(tensor.shape) for name, tensor in begin.items()}
        second = dict(first)
        for name, kept in self.moments.items():
            first[name], second[name] = _as_float32(kept.first), _as_float32(kept.second)
        if self.moments:
            first, second = joined(first), joined(second)
        result |= {f"first_moment.{name}": tensor for name, tensor in first.items()}
        result |= {f"second_moment.{name}": tensor for name, tensor in second.items()}
        for name, count in joined_counts(_update_counts(trained, self.moments)).items():
            result[f"update_count.{name}"] = InMemory(np.asarray(count, np.float32))
        return result


def resumable(model: OldModel) -> ResumableState:
    """Return the state of a role that can be resumed, with reasons for the rest.

    Raises:
        UsageError: no engine can continue from such a checkpoint.
    """
    if model.head == "reward_model":
        raise UsageError(
            f"{model.role.path} has a score head without a bias, which no engine's value or reward "
            "model has: use --to hf."
        )
    if f"{CLASSIFIER}.weight" in model.weights:
        raise UsageError(
            f"{model.role.path} has a head called {CLASSIFIER}, which no engine's value model has: "
            "use --to hf."
        )
    if model.adapter is not None:
        return _resumable_adapter(model, model.adapter)
    optimizer, why_not = _optimizer(model)
    extra = read_extra(model.role)
    names = {
        name: _TRL_HEAD.get(name, name)
        for name in model.weights
        if not (model.head == "trl_value_model" and name == LANGUAGE_HEAD)
    }
    weights = {
        new: _as_float32(optimizer.masters.get(old, model.weights[old]))
        for old, new in names.items()
    }
    moments = {
        new: optimizer.moments[old] for old, new in names.items() if old in optimizer.moments
    }
    carried = [
        "weights, as float32 masters" + (", the optimizer's own" if optimizer.masters else "")
    ]
    if moments:
        carried.append(f"both moments and the update counts of {len(moments)} parameters")
    absent = (
        [] if not moments else [new for new in weights if new not in moments and not is_buffer(new)]
    )
    if absent:
        why_not = (
            *why_not,
            (
                f"moments of {len(absent)} parameters that were never updated, such as "
                f"{absent[0]}: they begin at 0"
            ),
        )
    if moments:
        why_not = (
            *why_not,
            *_uneven(_update_counts([new for new in weights if not is_buffer(new)], moments)),
        )
    return ResumableState(
        model=replace(
            model,
            weights=weights,
            head="value_model" if model.head == "trl_value_model" else model.head,
        ),
        moments=moments,
        settings=optimizer.settings,
        decays_vectors=optimizer.decays_vectors,
        extra=extra,
        carried=(*carried, *extra.carried),
        not_carried=(*why_not, *extra.not_carried),
    )


def _update_counts(names: Iterable[str], moments: Mapping[str, OldMoments]) -> dict[str, int]:
    """Return the update count of every parameter; 0 if it was never updated."""
    return {name: moments[name].update_count if name in moments else 0 for name in names}


def _uneven(counts: Mapping[str, int]) -> list[str]:
    """Describe the loss if the old optimizer counted updates of each expert separately."""
    together = joined_counts(counts)
    fewer = [name for name, count in counts.items() if count < together[to_memory_name(name)]]
    if not fewer:
        return []
    return [
        (
            f"update counts of {len(fewer)} experts' matrices, such as {fewer[0]}: a layer's "
            "experts go on with the largest of theirs"
        )
    ]


def _resumable_adapter(model: OldModel, adapter: Adapter) -> ResumableState:
    """Return the state of an adapter and a critic's head: an engine does not save the base."""
    weights = adapter_weights(adapter, model)
    below = {
        name: tensor
        for name, tensor in weights.items()
        if not _is_of_head(name.removeprefix(PEFT_PREFIX))
    }
    optimizer = OldOptimizer(moments={})
    extra = read_extra(model.role)
    carried, why_not = ["the adapter's weights, as float32 masters"], [*extra.not_carried]
    try:
        optimizer = adapter_optimizer(model, weights)
        carried[0] += ", the optimizer's own" if optimizer.masters else ""
        carried.append(
            f"both moments and the update counts of {len(optimizer.moments.keys() & below.keys())} "
            "parameters"
        )
    except LayoutError as error:
        why_not.insert(0, f"optimizer moments: {error}")
    notes = [
        *model.notes,
        (
            f"resume it with lora.rank {adapter.rank} and the lora.alpha of the old run around the "
            "same base model"
        ),
    ]
    head = _extra_head(model, adapter)
    if head:
        carried.append("the value head, as float32")
        notes.append(
            "an engine trains the full value head in addition to the adapter: what the old run's "
            "adapter had added to it is part of it"
        )
        why_not.append(
            "moments of the value head, which the old run did not train itself: they begin at 0"
        )
    # By identity: the split of a fused matrix gives the same A to each projection.
    if len({id(pair.down) for pair in adapter.pairs.values()}) < len(adapter.pairs):
        notes.append(
            "q, k and v shared one A, and so did gate and up: each goes on with a copy of it and "
            "of its moments"
        )
    return ResumableState(
        model=replace(
            model,
            weights={
                name: _as_float32(optimizer.masters.get(name, tensor))
                for name, tensor in below.items()
            }
            | head,
            notes=tuple(notes),
        ),
        moments={name: kept for name, kept in optimizer.moments.items() if name in below},
        settings=optimizer.settings,
        decays_vectors=optimizer.decays_vectors,
        extra=extra,
        carried=(*carried, *extra.carried),
        not_carried=tuple(why_not),
    )


def _extra_head(model: OldModel, adapter: Adapter) -> dict[str, LazyTensor]:
    """Return a critic's head with the engine's names, merged with an adapter on it.

    Raises:
        UsageError: the adapter has a head, but the checkpoint lacks the base of it.
    """
    head = {
        name: _as_float32(tensor) for name, tensor in model.weights.items() if _is_of_head(name)
    }
    pairs = {module: pair for module, pair in adapter.pairs.items() if _is_of_head(f"{module}.")}
    if pairs and not head:
        raise UsageError(
            f"{model.role.path} has an adapter of the value head, but not the head itself, without "
            "which no run continues: start again."
        )
    full = merged(head, replace(adapter, pairs=pairs))
    return {f"{PEFT_PREFIX}{_TRL_HEAD.get(name, name)}": tensor for name, tensor in full.items()}


def _is_of_head(name: str) -> bool:
    return name.startswith(("score.", "v_head."))


def _optimizer(model: OldModel) -> tuple[OldOptimizer, tuple[str, ...]]:
    role = model.role
    try:
        if "optim" in role.fsdp_files:
            check_is_next_to_weights(role)
            return read_optimizer(role, model.weights, parameters=list(model.weights)), ()
        if role.dist_folders:
            return read_megatron_optimizer(model), ()
        if role.rank_files and has_flat_optimizer(model):
            return read_flat_optimizer(model, num_updates=model.num_updates), ()
    except LayoutError as error:
        return OldOptimizer(moments={}), (f"optimizer moments: {error}",)
    return OldOptimizer(moments={}), ("optimizer moments: the old checkpoint has none",)


def _as_float32(tensor: LazyTensor) -> LazyTensor:
    return Cast(tensor, FLOAT32) if tensor.dtype.is_float and tensor.dtype != FLOAT32 else tensor


def training_state(model: OldModel) -> "Iterator[TrainingState]":
    """Yield the portable training state of an old role, read as it is consumed.

    Any engine's ``load_state`` takes it.

    Raises:
        UsageError: no engine can continue from it, or it has no moments.
    """
    import torch  # the conversion of a step directory starts without it

    from temper_engine_api.weights import TrainingState

    state = resumable(model)
    if not state.moments:
        raise UsageError(
            f"{model.role.path} has no moments to go on from: {'; '.join(state.not_carried)}."
        )
    for name, tensor in state.model.weights.items():
        if not is_buffer(name):
            kept = state.moments.get(name)
            zeros = torch.zeros(tensor.shape)
            yield TrainingState(
                name=name,
                master=as_torch(tensor),
                first_moment=zeros if kept is None else as_torch(_as_float32(kept.first)),
                second_moment=zeros.clone() if kept is None else as_torch(_as_float32(kept.second)),
                update_count=0 if kept is None else kept.update_count,
            )


_SIDES = {".lora_A": "lora_A", ".lora_B": "lora_B"}


def adapter_weights(adapter: Adapter, model: OldModel) -> dict[str, LazyTensor]:
    """Return both halves of every module by PEFT's names.

    Raises:
        UsageError: of a kind that no engine trains.
    """
    tables = [
        module for module, pair in adapter.pairs.items() if pair.is_embedding or module == "lm_head"
    ]
    others = [*tables, *adapter.full, *(["biases"] if adapter.lacks_biases else [])]
    if others:
        raise UsageError(
            f"{model.role.path} trained {', '.join(others[:3])} next to its linear layers below "
            "the head, which no "
            "engine resumes: use --to peft or --to hf and start a new run from it."
        )
    result: dict[str, LazyTensor] = {}
    for module, pair in adapter.pairs.items():
        result[f"{PEFT_PREFIX}{module}.lora_A.weight"] = pair.down
        result[f"{PEFT_PREFIX}{module}.lora_B.weight"] = pair.up
    return result


def adapter_optimizer(model: OldModel, weights: Mapping[str, LazyTensor]) -> OldOptimizer:
    """Return the moments and masters of the adapter's halves, by the names of ``weights``.

    Raises:
        LayoutError: the assignment is ambiguous; the message shows the reason for the receipt.
    """
    role = model.role
    if role.dist_folders:
        read = read_megatron_adapter_optimizer(model)
        if read.moments.keys() != weights.keys():
            raise LayoutError(
                f"the optimizer keeps moments of {len(read.moments)} tensors, but the adapter has "
                f"{len(weights)}"
            )
        check_masters(read.masters, weights)
        return read
    if "optim" not in role.fsdp_files:
        raise LayoutError("the old checkpoint has none that tells what belongs to an adapter")
    check_is_next_to_weights(role)
    raw = rank_files.read_weights(role.fsdp_files["model"], where=role.path)
    leaves = [key for key in raw if any(side in key for side in _SIDES)]
    read = read_trained_leaves(role, raw, leaves=leaves)
    moments = {_peft_name(key): kept for key, kept in read.moments.items()}
    if moments.keys() != weights.keys():
        raise LayoutError(
            f"the optimizer keeps moments of {len(moments)} tensors, but the adapter has "
            f"{len(weights)}"
        )
    return OldOptimizer(moments=moments, settings=read.settings)


def _peft_name(key: str) -> str:
    """Convert ``[base_model.model.]MODULE.lora_A[.default].weight`` to PEFT's name."""
    bare = key.removeprefix(PEFT_PREFIX).removesuffix(".weight")
    module, _, half = bare.rpartition(".lora_")
    return f"{PEFT_PREFIX}{module}.lora_{half.partition('.')[0]}.weight"
