"""What the engine's part of a checkpoint consists of, and how it is read into the components of an engine again."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from temper_engine_api.weights import check_saved_entries
from temper_engine_megatron.checkpoint import checkpoint_files
from temper_engine_megatron.checkpoint.checkpoint_files import FileTensors
from temper_engine_megatron.components import EngineComponents
from temper_engine_megatron.huggingface import expert_names

AdapterContent = tuple[Mapping[str, object], Mapping[str, Tensor]]


def write_state(components: EngineComponents, *, directory: str) -> list[str]:
    """Write this rank's share of what is trained, and its random states; relative paths of its files. Collective."""
    return _write(_held(components), _Rest.of(components), directory=directory)


def stage_checkpoint(components: EngineComponents) -> Callable[[str], list[str]]:
    """Copy this rank's share of the state to host memory; what writes the copy on another thread. Collective."""
    held = list(_held(components))
    rest = _Rest.of(components)
    components.saving_group.open()
    return lambda directory: _write(held, rest, directory=directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """Of one rank, beside the state itself."""

    rank: int
    get_rng_states: Mapping[str, Tensor]
    description: dict[str, object]
    adapter: AdapterContent | None

    @classmethod
    def of(cls, components: EngineComponents) -> "_Rest":
        """As it is now. Collective."""
        return cls(
            rank=components.membership.topology.global_rank,
            get_rng_states=checkpoint_files.get_rng_states(
                components.membership.device, others=components.generators
            ),
            description=components.hf_config.to_dict(),
            adapter=None if components.adapter is None else components.adapter.export(),
        )


def _write(held: Iterable[FileTensors], rest: _Rest, *, directory: str) -> list[str]:
    """No collective but those of the stream."""
    files = checkpoint_files.write_state(held, directory=directory, rank=rest.rank)
    files.append(
        checkpoint_files.write_rng_states(rest.get_rng_states, directory=directory, rank=rest.rank)
    )
    if rest.rank == 0:
        files.append(checkpoint_files.write_model_config(rest.description, directory=directory))
    if rest.rank == 0 and rest.adapter is not None:
        files += checkpoint_files.write_adapter(*rest.adapter, directory=directory)
    return files


def _held(components: EngineComponents) -> Iterator[FileTensors]:
    """This rank's share of what is trained; and of what lies around it, where that is no longer what the model's files hold. Collective.

    Copies, each with memory of its own.
    """
    if components.optimizer is None:
        trained = map(
            checkpoint_files.weight_to_tensors, components.trained.iterate_weights_to_save()
        )
    else:
        trained = map(checkpoint_files.state_to_tensors, components.trained.iterate_state_to_save())
    if components.adapter is None or not components.adapter.has_replaced_base:
        return trained
    return itertools.chain(
        map(checkpoint_files.weight_to_tensors, components.state.iterate_weights_to_save()), trained
    )


def read_state(components: EngineComponents, *, directory: str) -> None:
    """The reverse, at this or another layout, from this or another engine; a rank reads the tensors that it has components of. No collective.

    Raises:
        CheckpointError: another configuration made it; nothing has been read then.
    """
    saved = checkpoint_files.open_saved_state(directory)
    in_files = expert_names.split_saved_experts(saved)
    expected = components.trained.expected()
    if components.adapter is not None:
        around = {entry.name for entry in components.state.expected()}
        components.adapter.check_base_weights(
            not in_files.weights.keys().isdisjoint(around), directory=directory
        )
        if components.adapter.has_replaced_base:
            expected = [*components.state.expected(), *expected]
    check_saved_entries(expected, in_files.entries(), directory=directory)
    if components.adapter is not None and components.adapter.has_replaced_base:
        components.state.load_local_weights(
            checkpoint_files.part_of(saved, components.state.local_names()).iterate_weights()
        )
    own = checkpoint_files.part_of(saved, components.trained.local_names())
    if components.optimizer is None:
        components.trained.load_local_weights(own.iterate_weights())
    else:
        components.trained.load_local_state(own.iterate_state())
    rank, device = components.membership.topology.global_rank, components.membership.device
    checkpoint_files.load_rng_states(
        directory=directory, rank=rank, device=device, others=components.generators
    )
