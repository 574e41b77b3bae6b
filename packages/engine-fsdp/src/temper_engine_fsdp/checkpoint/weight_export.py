"""Export and load weights and training state as full tensors under Hugging Face names.

Exports stream one tensor at a time. Loading checks all names and shapes before changing anything.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from temper_engine_api.checkpoint.saved_state import BUFFER, SavedState
from temper_engine_api.errors import WeightError
from temper_engine_api.file_names import FileNames
from temper_engine_api.weights import (
    NamedWeight,
    TrainingState,
    WeightEntry,
    check_weight_entries,
)
from temper_engine_fsdp.model.weight_names import PartJoiner
from temper_engine_fsdp.sharding.sharded_parameter import Buffers, ShardedParameters
from temper_engine_fsdp.training.sharded_optimizer import AdamState

MergeAdapter = Callable[[str, Tensor], Tensor]
"""Maps (weight name, full weight) to the weight with the adapter merged in."""


def list_weight_entries(
    parameters: ShardedParameters, buffers: Buffers, *, dtype: torch.dtype, file_names: FileNames
) -> list[WeightEntry]:
    """List the entries that `iterate_weights` will yield, without gathering."""
    tensors = [(name, p.shape, dtype) for name, p in parameters.items()]
    tensors += [(name, b.shape, b.dtype) for name, b in buffers.items()]
    return [
        WeightEntry(name=weight_name, shape=tuple(shape), dtype=own_dtype)
        for name, full_shape, own_dtype in tensors
        for weight_name, shape in file_names.list_shapes(name, full_shape)
    ]


def iterate_weights(
    parameters: ShardedParameters,
    buffers: Buffers,
    *,
    dtype: torch.dtype,
    file_names: FileNames,
    merge: MergeAdapter | None = None,
) -> Iterator[NamedWeight]:
    """Yield every parameter and persistent buffer as a full tensor.

    Every rank must read to the end, because each tensor is gathered when it is read.

    Args:
        parameters: The model's base weights.
        buffers: Persistent buffers.
        dtype: Dtype of the parameters; buffers keep their own.
        file_names: Names and parts of the tensors in files.
        merge: Merges an adapter into each weight; None without an adapter.
    """
    for name, parameter in parameters.items():
        if merge is not None:
            full = merge(name, parameter.gather(parameter.local_shard())).to(dtype)
        else:
            # Cast before gathering: half the traffic in bf16.
            full = parameter.gather(parameter.local_shard().to(dtype))
        # The experts of one parameter are separate tensors in files.
        for weight_name, tensor in file_names.split(name, full):
            yield NamedWeight(weight_name, tensor)
    for name, buffer in buffers.items():
        # Keep the dtype, because rounded router biases would choose other experts in rollouts.
        # Clone, so that later updates do not change the yielded tensor.
        for weight_name, tensor in file_names.split(name, buffer.detach().clone()):
            yield NamedWeight(weight_name, tensor)


@torch.no_grad()
def load_weights(
    parameters: ShardedParameters,
    buffers: Buffers,
    stream: Iterable[NamedWeight],
    *,
    file_names: FileNames,
) -> None:
    """Replace every parameter and persistent buffer.

    Each rank keeps only its shards until the complete stream has been checked.

    Raises:
        WeightError: If a name is missing, unexpected or repeated, or a shape differs; nothing is
            loaded then.
    """
    received: list[WeightEntry] = []
    shards: dict[str, Tensor] = {}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    shapes |= {name: buffer.shape for name, buffer in buffers.items()}
    joiner = PartJoiner(shapes, file_names=file_names)
    for weight_name, tensor in stream:
        # Check names and shapes after the loop, when missing names are known.
        received.append(
            WeightEntry(name=weight_name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        )
        joined = joiner.add(weight_name, tensor)
        if joined is None:
            continue
        name, full = joined
        # Copy buffers, because the sender may reuse its memory for the next tensor.
        shards[name] = (
            full.clone()
            if name in buffers
            else parameters[name].take_shard(full).to(parameters[name].dtype)
        )
    expected = list_weight_entries(parameters, buffers, dtype=torch.float32, file_names=file_names)
    check_weight_entries(expected, received)
    for name, shard in shards.items():
        (parameters[name].local_shard() if name in parameters else buffers[name]).copy_(shard)


def iterate_state(
    parameters: ShardedParameters, adam_states: Mapping[str, AdamState], *, file_names: FileNames
) -> Iterator[TrainingState]:
    """Yield each parameter's float32 master weight, AdamW state and update count. Collective."""
    for name, parameter in parameters.items():
        # int() waits for the device on CUDA, so it is called once per parameter, not per expert.
        state, count = adam_states[name], int(adam_states[name].count)
        full = parameter.gather_together([parameter.local_shard(), state.first, state.second])
        for parts in zip(*(file_names.split(name, tensor.float()) for tensor in full), strict=True):
            (weight_name, master), (_, first), (_, second) = parts
            yield TrainingState(
                name=weight_name,
                master=master,
                first_moment=first,
                second_moment=second,
                update_count=count,
            )


@torch.no_grad()
def load_state(
    parameters: ShardedParameters,
    adam_states: Mapping[str, AdamState],
    stream: Iterable[TrainingState],
    *,
    file_names: FileNames,
) -> None:
    """Replace master weights, AdamW states and update counts.

    Each rank keeps only its shards until the complete stream has been checked.

    Raises:
        WeightError: If a name is missing, unexpected or repeated, or a shape differs; nothing is
            loaded then.
    """
    received: list[WeightEntry] = []
    shards: dict[str, tuple[Tensor, Tensor, Tensor, int]] = {}
    full_shapes = {name: parameter.shape for name, parameter in parameters.items()}
    # One joiner per kind of tensor: the experts of a parameter arrive part by part.
    joiners = [PartJoiner(full_shapes, file_names=file_names) for _ in range(3)]
    for state in stream:
        shapes = {tuple(t.shape) for t in (state.master, state.first_moment, state.second_moment)}
        if len(shapes) != 1:
            raise WeightError(
                f"master weight and moments of {state.name} have different shapes "
                f"{sorted(shapes)}, but must have the same, so nothing was loaded: export the "
                "state again."
            )
        received.append(WeightEntry(name=state.name, shape=shapes.pop(), dtype=state.master.dtype))
        tensors = (state.master, state.first_moment, state.second_moment)
        joined = [
            joiner.add(state.name, tensor) for joiner, tensor in zip(joiners, tensors, strict=True)
        ]
        complete = [name_and_tensor for name_and_tensor in joined if name_and_tensor is not None]
        # The parts of the three kinds arrive together, so all three are complete or none is.
        if complete:
            name = complete[0][0]
            master, first, second = (parameters[name].take_shard(full) for _, full in complete)
            # All experts of a tensor have the same update count.
            shards[name] = (master, first, second, state.update_count)
    expected = list_weight_entries(parameters, {}, dtype=torch.float32, file_names=file_names)
    check_weight_entries(expected, received)
    for name, (master, first, second, count) in shards.items():
        parameters[name].local_shard().copy_(master)
        adam_states[name].first.copy_(first)
        adam_states[name].second.copy_(second)
        adam_states[name].count.fill_(float(count))


@torch.no_grad()
def load_portable_buffers(buffers: Buffers, saved: SavedState, *, file_names: FileNames) -> None:
    """Load buffers that another engine saved, such as router biases. Keep the others unchanged."""
    for name, buffer in buffers.items():
        for file_name, part in file_names.split(name, buffer):
            if file_name in saved.buffers:
                part.copy_(saved.read(BUFFER, file_name))
