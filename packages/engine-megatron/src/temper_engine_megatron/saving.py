"""What the engine's part of a checkpoint consists of, and how it is read into the parts of an engine again."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from temper_engine_api.weights import check_saved
from temper_engine_megatron import expert_names, persistence
from temper_engine_megatron.parts import Parts
from temper_engine_megatron.persistence import Held

AdapterContent = tuple[Mapping[str, object], Mapping[str, Tensor]]


def write_state(parts: Parts, *, directory: str) -> list[str]:
    """Write this rank's share of what is trained, and its random states; relative paths of its files. Collective."""
    return _write(_held(parts), _Rest.of(parts), directory=directory)


def stage_state(parts: Parts) -> Callable[[str], list[str]]:
    """Copy this rank's share of the state to host memory; what writes the copy on another thread. Collective."""
    held = list(_held(parts))
    rest = _Rest.of(parts)
    parts.saving_group.open()
    return lambda directory: _write(held, rest, directory=directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """Of one rank, beside the state itself."""

    rank: int
    random_states: Mapping[str, Tensor]
    description: dict[str, object]
    adapter: AdapterContent | None

    @classmethod
    def of(cls, parts: Parts) -> "_Rest":
        """As it is now. Collective."""
        return cls(
            rank=parts.membership.topology.global_rank,
            random_states=persistence.random_states(
                parts.membership.device, others=parts.generators
            ),
            description=parts.hf_config.to_dict(),
            adapter=None if parts.adapter is None else parts.adapter.export(),
        )


def _write(held: Iterable[Held], rest: _Rest, *, directory: str) -> list[str]:
    """No collective but those of the stream."""
    files = persistence.write_state(held, directory=directory, rank=rest.rank)
    files.append(
        persistence.write_random_states(rest.random_states, directory=directory, rank=rest.rank)
    )
    if rest.rank == 0:
        files.append(persistence.write_description(rest.description, directory=directory))
    if rest.rank == 0 and rest.adapter is not None:
        files += persistence.write_adapter(*rest.adapter, directory=directory)
    return files


def _held(parts: Parts) -> Iterator[Held]:
    """This rank's share of what is trained; and of what lies around it, where that is no longer what the model's files hold. Collective.

    Copies, each with memory of its own.
    """
    if parts.optimizer is None:
        trained = map(persistence.of_weight, parts.trained.iterate_owned_weights())
    else:
        trained = map(persistence.of_state, parts.trained.iterate_owned_state())
    if parts.adapter is None or not parts.adapter.is_on_other_weights:
        return trained
    return itertools.chain(map(persistence.of_weight, parts.state.iterate_owned_weights()), trained)


def read_state(parts: Parts, *, directory: str) -> None:
    """The reverse, at this or another layout, from this or another engine; a rank reads the tensors that it has parts of. No collective.

    Raises:
        CheckpointError: another configuration made it; nothing has been read then.
    """
    saved = persistence.open_state(directory)
    in_files = expert_names.by_names_in_files(saved)
    expected = parts.trained.expected()
    if parts.adapter is not None:
        around = {entry.name for entry in parts.state.expected()}
        parts.adapter.expect_weights(
            not in_files.weights.keys().isdisjoint(around), directory=directory
        )
        if parts.adapter.is_on_other_weights:
            expected = [*parts.state.expected(), *expected]
    check_saved(expected, in_files.entries(), directory=directory)
    if parts.adapter is not None and parts.adapter.is_on_other_weights:
        parts.state.load_own_weights(
            persistence.part_of(saved, parts.state.own_names()).iterate_weights()
        )
    own = persistence.part_of(saved, parts.trained.own_names())
    if parts.optimizer is None:
        parts.trained.load_own_weights(own.iterate_weights())
    else:
        parts.trained.load_own_state(own.iterate_state())
    rank, device = parts.membership.topology.global_rank, parts.membership.device
    persistence.read_random_states(
        directory=directory, rank=rank, device=device, others=parts.generators
    )
