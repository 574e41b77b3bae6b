"""Base class of the adapters: what both other projects lack and our contract needs.

It reads and writes the parameters and the AdamW moments of the other project's own model and
optimizer. It computes nothing itself. docs/conformance-other-engines.md lists each addition.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology
from temper_engine_api.weights import (
    NamedWeight,
    TrainingState,
    WeightEntry,
    check_weight_entries,
)

ObjectT = TypeVar("ObjectT")


class AdaptedEngine(BaseEngine):
    """An engine of another project on one rank, for a language model without an adapter."""

    config_class: ClassVar[type[EngineConfig]] = EngineConfig
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.LANGUAGE_MODEL, Capability.PORTABLE_STATE}
    )

    head_outputs: ClassVar[frozenset[HeadOutput]]
    """Outputs that the adapter offers."""
    model_attribute: ClassVar[str]
    """Name of the other engine's attribute that contains its model."""

    _other_engine: Any
    """The other project's engine; None once closed."""

    def _build(self) -> Topology:
        if self.config.model.path is None:
            raise ConfigError(
                "model.path is not set, but the other engines load their model from a directory: "
                "set it."
            )
        self._is_loaded = False
        self._build_other_engine(self.config.model.path)
        return Topology()

    @abstractmethod
    def _build_other_engine(self, model_path: str) -> None:
        """Set `_other_engine` to an engine with model, optimizer and schedule."""

    @property
    def _other_model(self) -> nn.Module:
        """The other engine's model, whose parameters have Hugging Face names."""
        model: nn.Module = getattr(self._other_engine, self.model_attribute)
        return model

    @property
    def _other_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._other_engine.optimizer
        return optimizer

    @abstractmethod
    def _enter_other_mode(self, mode: Literal["train", "eval"]) -> AbstractContextManager[object]:
        """Return the other engine's context of a mode."""

    def _check_outputs(self, requested: Iterable[HeadOutput]) -> None:
        for missing in sorted(set(requested) - self.head_outputs):
            raise CapabilityError(
                f"{type(self).__name__} does not compute {missing.value!r}; it computes "
                f"{', '.join(sorted(self.head_outputs))}."
            )

    @contextmanager
    def _loaded(self, mode: Literal["train", "eval", "update"]) -> Iterator[None]:
        # A nested mode must not leave the outer one: the other engines do not restore it.
        if mode == "update" or self._is_loaded:
            yield
            return
        self._is_loaded = True
        try:
            with self._enter_other_mode(mode):
                yield
        finally:
            self._is_loaded = False

    def _reduce_pending_gradients(self) -> None:
        """Do nothing: there is one rank."""

    def _set_learning_rate(self, lr: float, factors: Sequence[float] | None) -> None:
        """Set the learning rate of the next update.

        Args:
            lr: Rate of the contract's schedule.
            factors: Factors of the other engine's schedule at this step, one per parameter group.
                None if it has no schedule of this kind; `lr` is used then.
        """
        assert self.config.optimizer is not None
        groups = self._other_optimizer.param_groups
        rates = (
            [lr] * len(groups)
            if factors is None
            else [self.config.optimizer.lr * factor for factor in factors]
        )
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _parameters(self) -> dict[str, Tensor]:
        """Return the parameters' memory by Hugging Face name; on one rank a shard is all of it."""
        return {name: _get_local(p) for name, p in self._other_model.named_parameters()}

    def _weights(self) -> dict[str, Tensor]:
        """Return the parameters and the persistent buffers, which are also in the model's files."""
        saved = self._other_model.state_dict().keys()
        buffers = {name: b for name, b in self._other_model.named_buffers() if name in saved}
        return {**self._parameters(), **buffers}

    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        received, weights = list(stream), self._weights()
        _check_entries(weights, [(weight.name, weight.tensor) for weight in received])
        with torch.no_grad():
            for name, tensor in received:
                weights[name].copy_(tensor)

    def _iterate_state(self) -> Iterator[TrainingState]:
        states = self._other_optimizer.state
        for name, parameter in self._other_model.named_parameters():
            # Empty before the first update, and if the parameter never had a gradient.
            state = states.get(parameter, {})
            master = _get_local(parameter).float().clone()
            moments = [
                _get_local(state[key]).float().clone() if key in state else torch.zeros_like(master)
                for key in ("exp_avg", "exp_avg_sq")
            ]
            yield TrainingState(
                name=name,
                master=master,
                first_moment=moments[0],
                second_moment=moments[1],
                update_count=int(state.get("step", 0)),
            )

    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        entries = list(stream)
        _check_entries(self._parameters(), [(state.name, state.master) for state in entries])
        received = {state.name: state for state in entries}
        self._create_moments()
        with torch.no_grad():
            for name, parameter in self._other_model.named_parameters():
                arrived, state = received[name], self._other_optimizer.state[parameter]
                _get_local(parameter).copy_(arrived.master)
                _get_local(state["exp_avg"]).copy_(arrived.first_moment)
                _get_local(state["exp_avg_sq"]).copy_(arrived.second_moment)
                state["step"].fill_(arrived.update_count)

    def _create_moments(self) -> None:
        """Let the optimizer create its moments, which torch does in the first step."""
        for group in self._other_optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in self._other_model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._other_optimizer.step()
        self._zero_gradients()

    def _list_files(self, directory: str, *, before: set[Path]) -> list[str]:
        """Return the files in a directory that were not there before, relative to it."""
        files = {path for path in Path(directory).rglob("*") if path.is_file()}
        return sorted(str(path.relative_to(directory)) for path in files - before)

    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        return value

    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        return [item]

    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        """Check the arguments only: the adapters run on the CPU."""
        self._check_can_move(device)


def select_positions(micro: SequenceBatch, *, is_training: bool) -> Tensor:
    """Return [T] positions with outputs: the trained ones, or all but the first of a sequence."""
    if is_training:
        return micro.loss_mask
    has_context = torch.ones_like(micro.loss_mask)
    has_context[micro.sequence_starts[:-1].long()] = False
    return has_context


def align_to_labels(column: Tensor, mask: Tensor) -> Tensor:
    """Move [T] values from the position that predicts a token to the token; 0 outside the mask."""
    shifted = torch.cat([column.new_zeros(1), column[:-1]])
    return torch.where(mask, shifted, 0.0)


def _check_entries(own: Mapping[str, Tensor], arrived: Sequence[tuple[str, Tensor]]) -> None:
    def describe(name: str, tensor: Tensor) -> WeightEntry:
        return WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)

    check_weight_entries(
        [describe(name, tensor) for name, tensor in own.items()],
        [describe(name, tensor) for name, tensor in arrived],
    )


def _get_local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
