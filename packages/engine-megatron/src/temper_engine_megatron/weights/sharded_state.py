"""Export and load weights and training state as full tensors under Hugging Face names.

Loading checks all names and shapes before it changes anything; until then each rank keeps only its
own shards of what has arrived.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, TrainingState, WeightEntry, check_weight_entries
from temper_engine_megatron.training.megatron_optimizer import MegatronAdamW, ParameterState
from temper_engine_megatron.weights.parameter_map import MappedParameter, ParameterMap

MergeAdapter = Callable[[str, Tensor], Tensor]
"""Maps (weight name, full weight) to the weight with the adapter merged in. Collective."""


class ShardedState:
    """Parameters of a model or an adapter, with their optimizer states."""

    def __init__(self, parameters: ParameterMap, optimizer: MegatronAdamW | None) -> None:
        self._parameter_map = parameters
        self._optimizer = optimizer

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return self._parameter_map.compute_dtype

    def list_weight_entries(self) -> list[WeightEntry]:
        """List all Hugging Face names with full shapes, in the order of an export."""
        return self._parameter_map.list_weight_entries()

    def list_trained_entries(self) -> list[WeightEntry]:
        """List the same without buffers, which have no training state."""
        return self._parameter_map.list_weight_entries(with_buffers=False)

    def iterate_weights(
        self, *, dtype: torch.dtype, merge: MergeAdapter | None = None
    ) -> Iterator[NamedWeight]:
        """Yield full tensors, gathering one parameter at a time. Collective.

        Args:
            dtype: Dtype of the parameters; buffers are float32.
            merge: Merges an adapter into each weight; None without an adapter.
        """
        for entry in self._parameter_map.entries:
            # Gather in the compute dtype. This is half the traffic of master weights, and
            # parameters are rounded from them anyway. Buffers are not: the biases of routers are
            # float32 in training, and rounded ones choose other experts in the rollouts.
            is_buffer = entry.info.is_buffer
            own_dtype = torch.float32 if is_buffer else self._parameter_map.compute_dtype
            local = entry.parameter
            if local is not None:
                local = local.detach().to(own_dtype)
            for name, tensor in self._parameter_map.gather(entry, local, dtype=own_dtype).items():
                merged = tensor if merge is None else merge(name, tensor)
                yield NamedWeight(name, merged.to(own_dtype if is_buffer else dtype, copy=True))

    def iterate_masters(self) -> Iterator[NamedWeight]:
        """Yield full float32 master weights, gathering one parameter at a time. Collective."""
        for entry in self._parameter_map.trained_entries:
            for name, tensor in self._gather_master(entry).items():
                yield NamedWeight(name, tensor.clone())

    def gather_master(self, name: str) -> Tensor:
        """Return one full float32 master weight. Collective."""
        (entry,) = (entry for entry in self._parameter_map.entries if name in entry.mapping.names)
        return self._gather_master(entry)[name]

    def _gather_master(self, entry: MappedParameter) -> dict[str, Tensor]:
        parameter = entry.parameter
        if parameter is None:
            return self._parameter_map.gather(entry, None, dtype=torch.float32)
        local = (
            parameter.detach().float()
            if self._optimizer is None
            else self._optimizer.read_state(parameter).master
        )
        return self._parameter_map.gather(entry, local, dtype=torch.float32)

    def write_shard(self, parameter: Tensor, shard: Tensor) -> None:
        """Replace this rank's shard of a parameter or buffer; moments stay."""
        if self._optimizer is None or not isinstance(parameter, nn.Parameter):
            parameter.data.copy_(shard)
        else:
            self._optimizer.write_master(parameter, shard.to(parameter.device, torch.float32))

    def local_names(self) -> list[str]:
        """List the trained tensors that this rank reads from a checkpoint, by name."""
        return [
            name
            for entry in self._parameter_map.trained_entries
            if self._parameter_map.local_parameters(entry)
            for name in entry.mapping.names
        ]

    def _local_entries(self) -> list[WeightEntry]:
        local_names = set(self.local_names())
        return [entry for entry in self.list_weight_entries() if entry.name in local_names]

    def load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Replace all parameters; moments stay.

        Raises:
            WeightError: If a name is missing, unexpected or repeated, or a shape differs; nothing
                is loaded then.
        """
        self._load_weights(stream, _Collector(self._parameter_map, self.list_weight_entries()))

    def load_local_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Load the weights named in `local_names` only; see `load_weights`."""
        self._load_weights(stream, _Collector(self._parameter_map, self._local_entries()))

    def _load_weights(self, stream: Iterable[NamedWeight], collector: "_Collector") -> None:
        for name, tensor in stream:
            collector.add(name, [tensor])
        for entry, (shard,) in collector.finish():
            self._write_master(entry, shard)

    def fill(self, read: Callable[[str], Tensor], *, names: Collection[str] | None = None) -> None:
        """Set this rank's parameters from a function that returns full tensors by name.

        Args:
            read: Returns a full tensor.
            names: Names to set; None sets all.
        """
        for entry in self._parameter_map.entries:
            if self._parameter_map.local_parameters(entry) and (
                names is None or entry.mapping.names[0] in names
            ):
                tensors = [read(name) for name in entry.mapping.names]
                self._write_master(entry, self._parameter_map.take_shard(entry, tensors))

    def iterate_state(self) -> Iterator[TrainingState]:
        """Yield each parameter's float32 master weight, Adam moments and update count. Collective.

        One parameter is gathered at a time.
        """
        optimizer = self._require_optimizer()
        for entry in self._parameter_map.trained_entries:
            state = None if entry.parameter is None else optimizer.read_state(entry.parameter)
            local = (None,) * 3 if state is None else (state.master, state.first, state.second)
            masters, firsts, seconds = (
                self._parameter_map.gather(entry, tensor, dtype=torch.float32) for tensor in local
            )
            count = self._parameter_map.broadcast_count(entry, 0 if state is None else state.count)
            for name, master in masters.items():
                yield TrainingState(
                    name=name,
                    # Without parallelism the gathered tensor may share memory with the optimizer.
                    master=master.clone(),
                    first_moment=firsts[name].clone(),
                    second_moment=seconds[name].clone(),
                    update_count=count,
                )

    def iterate_weights_to_save(self) -> Iterator[NamedWeight]:
        """Yield the float32 weights that this rank writes to a checkpoint. Collective.

        Every tensor is yielded on a single rank.
        """
        # Only the writer's copy among those of the data-parallel ranks takes part.
        for entry in self._parameter_map.trained_entries:
            if entry.parameter is not None and self._parameter_map.takes_part_in_saving(entry):
                tensors = self._parameter_map.gather_to_writer(entry, entry.parameter.detach())
                for name, tensor in tensors.items():
                    yield NamedWeight(name, tensor.to(torch.float32, copy=True))

    def iterate_buffers_to_save(self) -> Iterator[NamedWeight]:
        """Yield the buffers that this rank writes to a checkpoint, each on a single rank."""
        for entry in self._parameter_map.entries:
            # Buffers are not divided, so only their writer takes part.
            if entry.info.is_buffer and self._parameter_map.takes_part_in_saving(entry):
                assert entry.parameter is not None, "a writer has the tensor"
                yield NamedWeight(entry.mapping.names[0], entry.parameter.detach().clone())

    def load_buffers(self, read: Callable[[str], Tensor], *, names: Collection[str]) -> None:
        """Set this rank's buffers with these names, and leave all other buffers unchanged."""
        for entry in self._parameter_map.entries:
            if entry.info.is_buffer and entry.mapping.names[0] in names:
                for buffer in self._parameter_map.local_parameters(entry):
                    buffer.copy_(read(entry.mapping.names[0]))

    def iterate_state_to_save(self) -> Iterator[TrainingState]:
        """Yield the training state that this rank writes to a checkpoint. Collective.

        The tensors are in host memory. Each of them is yielded on one rank only.
        """
        optimizer = self._require_optimizer()
        for entry in self._parameter_map.trained_entries:
            takes_part = self._parameter_map.takes_part_in_saving(entry)
            # Reading a distributed state is collective, also for ranks that write nothing.
            if entry.parameter is None or not (takes_part or optimizer.is_distributed):
                continue
            state = optimizer.read_state(entry.parameter)
            if takes_part:
                # Send one tensor after the other, so that the device has a single full tensor at a
                # time.
                masters, firsts, seconds = (
                    self._gather_on_host(entry, tensor)
                    for tensor in (state.master, state.first, state.second)
                )
                for name, master in masters.items():
                    yield TrainingState(
                        name=name,
                        master=master,
                        first_moment=firsts[name],
                        second_moment=seconds[name],
                        update_count=state.count,
                    )

    def _gather_on_host(self, entry: MappedParameter, local: Tensor) -> dict[str, Tensor]:
        return {
            name: tensor.to("cpu", copy=True)
            for name, tensor in self._parameter_map.gather_to_writer(entry, local).items()
        }

    def load_state(self, stream: Iterable[TrainingState]) -> None:
        """Replace all master weights, moments and update counts.

        Raises:
            WeightError: If a name is missing, unexpected or repeated, or a shape differs; nothing
                is loaded then.
        """
        self._load_state(stream, _Collector(self._parameter_map, self.list_trained_entries()))

    def load_local_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the state of the names in `local_names` only; see `load_state`."""
        self._load_state(stream, _Collector(self._parameter_map, self._local_entries()))

    def _load_state(self, stream: Iterable[TrainingState], collector: "_Collector") -> None:
        optimizer = self._require_optimizer()
        counts: dict[str, int] = {}
        for state in stream:
            _check_same_shapes(state)
            collector.add(state.name, [state.master, state.first_moment, state.second_moment])
            counts[state.name] = state.update_count
        for entry, (master, first, second) in collector.finish():
            count = counts[entry.mapping.names[0]]
            for parameter in self._parameter_map.local_parameters(entry):
                optimizer.write_state(
                    parameter,
                    ParameterState(master=master, first=first, second=second, count=count),
                )

    def _write_master(self, entry: MappedParameter, shard: Tensor) -> None:
        for parameter in self._parameter_map.local_parameters(entry):
            self.write_shard(parameter, shard)

    def _require_optimizer(self) -> MegatronAdamW:
        assert self._optimizer is not None, "the engine checks that there is an optimizer"
        return self._optimizer


class _Collector:
    """Collects full tensors in any order, and keeps this rank's shards until all have arrived."""

    def __init__(self, parameters: ParameterMap, expected: list[WeightEntry]) -> None:
        """Expect these entries, which include every tensor that this rank has a shard of."""
        self._parameter_map = parameters
        self._expected = expected
        self._shapes = {entry.name: entry.shape for entry in self._expected}
        self._entry_of = {
            name: entry for entry in parameters.entries for name in entry.mapping.names
        }
        self._received: list[WeightEntry] = []
        self._waiting: dict[str, Sequence[Tensor]] = {}
        self._shards: dict[str, list[Tensor]] = {}

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Add tensors of the same shape for one name."""
        self._received.append(
            WeightEntry(name=name, shape=tuple(tensors[0].shape), dtype=tensors[0].dtype)
        )
        if self._shapes.get(name) != tuple(tensors[0].shape):
            return
        self._waiting[name] = tensors
        entry = self._entry_of[name]
        # A parameter such as linear_qkv needs several names before its shard can be taken.
        if not all(other in self._waiting for other in entry.mapping.names):
            return
        if self._parameter_map.local_parameters(entry):
            kinds = zip(*(self._waiting[other] for other in entry.mapping.names), strict=True)
            # Clone the shard, because a view would keep the full tensor alive.
            self._shards[entry.info.name] = [
                self._parameter_map.take_shard(entry, tensors_of_kind).clone()
                for tensors_of_kind in kinds
            ]
        for other in entry.mapping.names:
            self._waiting[other] = ()

    def finish(self) -> Iterator[tuple[MappedParameter, list[Tensor]]]:
        """Yield the entries of which this rank has a shard, with its shards.

        Raises:
            WeightError: If other names or shapes have arrived than expected.
        """
        check_weight_entries(self._expected, self._received)
        for entry in self._parameter_map.entries:
            if entry.info.name in self._shards:
                yield entry, self._shards[entry.info.name]


def _check_same_shapes(state: TrainingState) -> None:
    shapes = {tuple(t.shape) for t in (state.master, state.first_moment, state.second_moment)}
    if len(shapes) != 1:
        raise WeightError(
            f"master weight and moments of {state.name} have different shapes {sorted(shapes)}, "
            "but must have the same, so nothing was loaded: export the state again."
        )
