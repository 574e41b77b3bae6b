"""Weights and the portable training state of an engine, streamed out of its ranks and loaded strictly both ways.

What arrives is kept as this rank's parts until the whole stream has been checked.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from temper_engine_api.weights import NamedWeight, TrainingState, WeightEntry, check_weight_entries
from temper_engine_megatron.training.megatron_optimizer import MegatronAdamW, ParameterState
from temper_engine_megatron.weights.parameter_map import (
    MappedParameter,
    ParameterMap,
    check_shapes_agree,
)

Merge = Callable[[str, Tensor], Tensor]
"""From a Hugging Face name and the full weight of the base to the weight with its adapter. Collective."""


class ShardedState:
    """The weights of one engine with what its optimizer knows about them."""

    def __init__(self, parameters: ParameterMap, optimizer: MegatronAdamW | None) -> None:
        self._map = parameters
        self._optimizer = optimizer

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return self._map.compute_dtype

    def expected(self) -> list[WeightEntry]:
        """Every Hugging Face name with its shape, in the order of the export."""
        return self._map.expected()

    def iterate_weights(
        self, *, dtype: torch.dtype, merge: Merge | None = None
    ) -> Iterator[NamedWeight]:
        """Full tensors in this dtype, one parameter at a time. Collective.

        Args:
            dtype: of what comes out.
            merge: adds what an adapter does to a weight; None where there is no adapter.
        """
        for entry in self._map.entries:
            # In the compute dtype a parameter is its master weight, rounded.
            local = None if entry.parameter is None else entry.parameter.detach()
            for name, tensor in self._map.to_full(
                entry, local, dtype=self._map.compute_dtype
            ).items():
                merged = tensor if merge is None else merge(name, tensor)
                yield NamedWeight(name, merged.to(dtype, copy=True))

    def iterate_masters(self) -> Iterator[NamedWeight]:
        """Full float32 tensors, one parameter at a time, as exact as the optimizer has them. Collective."""
        for entry in self._map.entries:
            for name, tensor in self._full_master(entry).items():
                yield NamedWeight(name, tensor.clone())

    def full(self, name: str) -> Tensor:
        """One full float32 tensor, as exact as the optimizer has it. Collective."""
        (entry,) = (entry for entry in self._map.entries if name in entry.recipe.names)
        return self._full_master(entry)[name]

    def _full_master(self, entry: MappedParameter) -> dict[str, Tensor]:
        held = entry.parameter
        if held is None:
            return self._map.to_full(entry, None, dtype=torch.float32)
        local = (
            held.detach().float() if self._optimizer is None else self._optimizer.read(held).master
        )
        return self._map.to_full(entry, local, dtype=torch.float32)

    def write_local(self, parameter: nn.Parameter, local: Tensor) -> None:
        """Replace this rank's part of a parameter; moments stay."""
        if self._optimizer is None:
            parameter.data.copy_(local)
        else:
            self._optimizer.write_master(parameter, local.to(parameter.device, torch.float32))

    def local_names(self) -> list[str]:
        """Those of which this rank holds a part: what it needs of a checkpoint."""
        return [
            name
            for entry in self._map.entries
            if self._map.holders(entry)
            for name in entry.recipe.names
        ]

    def _own_entries(self) -> list[WeightEntry]:
        own = set(self.local_names())
        return [entry for entry in self.expected() if entry.name in own]

    def load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Replace every parameter; moments stay.

        Raises:
            WeightError: a name is missing, unexpected or repeated, or a shape differs; nothing has been loaded then.
        """
        self._load_weights(stream, _Collector(self._map, self.expected()))

    def load_local_weights(self, stream: Iterable[NamedWeight]) -> None:
        """As ``load_weights``, of the names in ``local_names`` alone."""
        self._load_weights(stream, _Collector(self._map, self._own_entries()))

    def _load_weights(self, stream: Iterable[NamedWeight], collector: "_Collector") -> None:
        for name, tensor in stream:
            collector.add(name, [tensor])
        for entry, (local,) in collector.finish():
            self._write_master(entry, local)

    def fill(self, read: Callable[[str], Tensor], *, names: Collection[str] | None = None) -> None:
        """Fill this rank's parameters, or those of these names, from a function that gives full tensors by name."""
        for entry in self._map.entries:
            if self._map.holders(entry) and (names is None or entry.recipe.names[0] in names):
                self._write_master(
                    entry, self._map.to_local(entry, [read(name) for name in entry.recipe.names])
                )

    def iterate_state(self) -> Iterator[TrainingState]:
        """Full float32 tensors, one parameter at a time. Collective."""
        optimizer = self._require_optimizer()
        for entry in self._map.entries:
            kept = None if entry.parameter is None else optimizer.read(entry.parameter)
            parts = (None,) * 3 if kept is None else (kept.master, kept.first, kept.second)
            masters, firsts, seconds = (
                self._map.to_full(entry, part, dtype=torch.float32) for part in parts
            )
            count = self._map.broadcast_count(entry, 0 if kept is None else kept.count)
            for name, master in masters.items():
                yield TrainingState(
                    name=name,
                    # One stage's tensor may still be the optimizer's own.
                    master=master.clone(),
                    first_moment=firsts[name].clone(),
                    second_moment=seconds[name].clone(),
                    update_count=count,
                )

    def iterate_weights_to_save(self) -> Iterator[NamedWeight]:
        """Those that this rank writes into a checkpoint, float32; no other rank has them. Collective."""
        for entry in self._map.entries:
            if entry.parameter is not None and self._map.takes_part_in_saving(entry):
                for name, tensor in self._map.gather_to_writer(
                    entry, entry.parameter.detach()
                ).items():
                    yield NamedWeight(name, tensor.to(torch.float32, copy=True))

    def iterate_state_to_save(self) -> Iterator[TrainingState]:
        """As ``iterate_state``, in host memory, of the names that this rank writes into a checkpoint; no other has them. Collective."""
        optimizer = self._require_optimizer()
        for entry in self._map.entries:
            is_gathered = self._map.takes_part_in_saving(entry)
            if entry.parameter is None or not (is_gathered or optimizer.is_distributed):
                continue
            kept = optimizer.read(entry.parameter)
            if is_gathered:
                # One kind after the other, so that the device never has more than one whole tensor.
                masters, firsts, seconds = (
                    self._to_host(entry, part) for part in (kept.master, kept.first, kept.second)
                )
                for name, master in masters.items():
                    yield TrainingState(
                        name=name,
                        master=master,
                        first_moment=firsts[name],
                        second_moment=seconds[name],
                        update_count=kept.count,
                    )

    def _to_host(self, entry: MappedParameter, part: Tensor) -> dict[str, Tensor]:
        return {
            name: tensor.to("cpu", copy=True)
            for name, tensor in self._map.gather_to_writer(entry, part).items()
        }

    def load_state(self, stream: Iterable[TrainingState]) -> None:
        """Replace masters, moments and counts.

        Raises:
            WeightError: a name is missing, unexpected or repeated, or a shape differs; nothing has been loaded then.
        """
        self._load_state(stream, _Collector(self._map, self.expected()))

    def load_local_state(self, stream: Iterable[TrainingState]) -> None:
        """As ``load_state``, of the names in ``local_names`` alone."""
        self._load_state(stream, _Collector(self._map, self._own_entries()))

    def _load_state(self, stream: Iterable[TrainingState], collector: "_Collector") -> None:
        optimizer = self._require_optimizer()
        counts: dict[str, int] = {}
        for state in stream:
            check_shapes_agree(state.name, state.master, state.first_moment, state.second_moment)
            collector.add(state.name, [state.master, state.first_moment, state.second_moment])
            counts[state.name] = state.update_count
        for entry, (master, first, second) in collector.finish():
            count = counts[entry.recipe.names[0]]
            for parameter in self._map.holders(entry):
                optimizer.write(
                    parameter,
                    ParameterState(master=master, first=first, second=second, count=count),
                )

    def _write_master(self, entry: MappedParameter, local: Tensor) -> None:
        for parameter in self._map.holders(entry):
            self.write_local(parameter, local)

    def _require_optimizer(self) -> MegatronAdamW:
        assert self._optimizer is not None, "the engine asks only where there is one"
        return self._optimizer


class _Collector:
    """Takes full tensors in any order, keeps this rank's parts of them, and gives those out once everything has arrived."""

    def __init__(self, parameters: ParameterMap, expected: list[WeightEntry]) -> None:
        """Of these names, among which is every one of which this rank has a part."""
        self._map = parameters
        self._expected = expected
        self._shapes = {entry.name: entry.shape for entry in self._expected}
        self._entry_of = {
            name: entry for entry in parameters.entries for name in entry.recipe.names
        }
        self._arrived: list[WeightEntry] = []
        self._waiting: dict[str, Sequence[Tensor]] = {}
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """One name, with one or more tensors of one shape."""
        self._arrived.append(
            WeightEntry(name=name, shape=tuple(tensors[0].shape), dtype=tensors[0].dtype)
        )
        if self._shapes.get(name) != tuple(tensors[0].shape):
            return
        self._waiting[name] = tensors
        entry = self._entry_of[name]
        if self._map.holders(entry) and all(other in self._waiting for other in entry.recipe.names):
            columns = zip(*(self._waiting[other] for other in entry.recipe.names), strict=True)
            # A part that is a view would keep the whole alive.
            self._parts[entry.described.name] = [
                self._map.to_local(entry, column).clone() for column in columns
            ]
        if all(other in self._waiting for other in entry.recipe.names):
            for other in entry.recipe.names:
                self._waiting[other] = ()

    def finish(self) -> Iterator[tuple[MappedParameter, list[Tensor]]]:
        """Entries of which this rank has a part, with its parts.

        Raises:
            WeightError: what arrived is not what was expected.
        """
        check_weight_entries(self._expected, self._arrived)
        for entry in self._map.entries:
            if self._map.holders(entry):
                yield entry, self._parts[entry.described.name]
