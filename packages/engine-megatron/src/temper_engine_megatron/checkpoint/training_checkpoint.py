"""Save and load the engine's part of a checkpoint.

`write_checkpoint` saves the live state. `stage_checkpoint` first copies it to host memory, so that
a thread can write the copy while training continues.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.checkpoint.saved_state import BUFFER
from temper_engine_api.weights import check_saved_entries
from temper_engine_megatron.checkpoint import checkpoint_files
from temper_engine_megatron.checkpoint.checkpoint_files import FileTensors
from temper_engine_megatron.components import EngineComponents
from temper_engine_megatron.huggingface.weight_names import split_saved_experts

AdapterContent = tuple[Mapping[str, object], Mapping[str, Tensor]]
"""Contents of PEFT's two files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SmallFiles:
    """Contents of one rank's files other than the training state."""

    rank: int
    rng_states: Mapping[str, Tensor]
    model_config: dict[str, object]
    adapter: AdapterContent | None
    """None without an adapter."""


def write_checkpoint(components: EngineComponents, *, directory: str) -> list[str]:
    """Write what this rank saves; return relative paths. Collective."""
    return _write(_iterate_state(components), _collect_small_files(components), directory=directory)


def stage_checkpoint(components: EngineComponents) -> Callable[[str], list[str]]:
    """Copy what this rank saves to host memory. Collective.

    Returns:
        A function that writes the copy to a directory and returns the relative paths; it may run on
        another thread.
    """
    state = list(_iterate_state(components))
    small_files = _collect_small_files(components)
    # Create the group of the background threads now: that is collective.
    components.saving_group.get()
    return lambda directory: _write(state, small_files, directory=directory)


def _collect_small_files(components: EngineComponents) -> _SmallFiles:
    return _SmallFiles(
        rank=components.membership.topology.global_rank,
        rng_states=checkpoint_files.get_rng_states(
            components.membership.device, generators=components.generators
        ),
        model_config=components.hf_config.to_dict(),
        adapter=None if components.adapter is None else components.adapter.export(),
    )


def _write(state: Iterable[FileTensors], small_files: _SmallFiles, *, directory: str) -> list[str]:
    # Write the state first. Iterating over a live state is collective: if a rank failed before it,
    # the others would wait for that rank.
    rank = small_files.rank
    files = checkpoint_files.write_state_files(state, directory=directory, rank=rank)
    files.append(
        checkpoint_files.write_rng_states(small_files.rng_states, directory=directory, rank=rank)
    )
    if rank == 0:
        files.append(
            checkpoint_files.write_model_config(small_files.model_config, directory=directory)
        )
    if rank == 0 and small_files.adapter is not None:
        files += checkpoint_files.write_adapter(*small_files.adapter, directory=directory)
    return files


def _iterate_state(components: EngineComponents) -> Iterator[FileTensors]:
    """Yield copies of the training state that this rank saves. Collective.

    With an adapter, includes the frozen base weights if they differ from the model's files.
    """
    if components.optimizer is None:
        trainable = map(
            checkpoint_files.weight_to_tensors,
            components.trainable_state.iterate_weights_to_save(),
        )
    else:
        trainable = map(
            checkpoint_files.state_to_tensors, components.trainable_state.iterate_state_to_save()
        )
    buffers = map(
        checkpoint_files.buffer_to_tensors, components.base_state.iterate_buffers_to_save()
    )
    if components.adapter is None:
        return itertools.chain(trainable, buffers)
    if not components.adapter.has_replaced_base:
        return trainable
    base = map(checkpoint_files.weight_to_tensors, components.base_state.iterate_weights_to_save())
    return itertools.chain(base, trainable, buffers)


def load_training_state(components: EngineComponents, *, directory: str) -> None:
    """Load a checkpoint of any layout or engine. No communication.

    A rank reads the tensors of which it has a shard.

    Raises:
        CheckpointError: If another configuration made the checkpoint; nothing is loaded then.
    """
    saved = checkpoint_files.open_saved_state(directory)
    file_names = components.file_names
    split_saved = split_saved_experts(saved, file_names)
    base, trainable = components.base_state, components.trainable_state
    expected = trainable.list_trained_entries()
    loads_base = False
    if components.adapter is not None:
        base_names = {entry.name for entry in base.list_trained_entries()}
        loads_base = not split_saved.weights.keys().isdisjoint(base_names)
        components.adapter.check_base_weights(loads_base, directory=directory)
        if loads_base:
            expected = [*base.list_trained_entries(), *expected]
    check_saved_entries(expected, split_saved.list_entries(), directory=directory)
    if loads_base:
        base.load_local_weights(
            checkpoint_files.select_saved(
                saved, base.local_names(), file_names=file_names
            ).iterate_weights()
        )
    # FSDPEngine saves buffers by their names in memory, which are mapped to names in files.
    buffer_names = {
        file_name: name
        for name in saved.buffers
        for file_name, _ in file_names.split(name, torch.empty(()))
    }
    base.load_buffers(lambda name: saved.read(BUFFER, buffer_names[name]), names=buffer_names)
    local = checkpoint_files.select_saved(saved, trainable.local_names(), file_names=file_names)
    if components.optimizer is None:
        trainable.load_local_weights(local.iterate_weights())
    else:
        trainable.load_local_state(local.iterate_state())
    checkpoint_files.load_rng_states(
        directory=directory,
        rank=components.membership.topology.global_rank,
        device=components.membership.device,
        generators=components.generators,
    )
