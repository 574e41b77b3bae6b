"""Any torch.optim.Optimizer on sharded parameters, chosen by its dotted path."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import OptimizerSpec
from temper_engine_fsdp.sharding.sharded_parameter import (
    FSDP1Parameter,
    ShardedParameters,
    local_tensor,
)
from temper_engine_fsdp.training.sharded_optimizer import (
    GradientShards,
    ShardedOptimizer,
    StateTensor,
)

ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""torch.optim classes that give the same update on a slice of a flat parameter."""
ALTERNATIVES = (
    "Torch's elementwise optimizers, such as torch.optim.NAdam or torch.optim.Adagrad, train "
    "sharded parameters."
)
"""Advice at the end of the error messages."""
STATE_PREFIX = "optimizer_state"
"""First part of the names in a checkpoint."""

_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


class TorchOptimizer(ShardedOptimizer):
    """Wraps an optimizer class with two groups: matrices with weight decay, vectors without."""

    def __init__(
        self,
        parameters: ShardedParameters,
        *,
        spec: OptimizerSpec,
        sum_over_shards: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(parameters, spec=spec, sum_over_shards=sum_over_shards)
        is_flat = any(isinstance(p, FSDP1Parameter) for p in parameters.values())
        cls = _load_optimizer_class(spec, is_flat=is_flat)
        takes_decay = _accepts(cls, "weight_decay")
        groups = [
            {
                "params": [
                    p.tensor
                    for name, p in parameters.items()
                    if self._decays(name) == decays and p.tensor.requires_grad
                ],
                **({"weight_decay": decay} if takes_decay else {}),
            }
            for decays, decay in ((True, spec.weight_decay), (False, 0.0))
        ]
        build: Callable[..., torch.optim.Optimizer] = cls
        groups = [group for group in groups if group["params"]]
        try:
            self._optimizer = build(
                [self._with_smallest_parameter(group) for group in groups],
                lr=spec.lr,
                **spec.arguments,
            )
            # Unsupported shapes and layouts fail in step() only, so try one before training.
            self._check_update()
            self._optimizer = build(groups, lr=spec.lr, **spec.arguments)
        except (TypeError, ValueError) as error:
            raise CapabilityError(
                f"optimizer.name {spec.name} does not accept this model's parameters: {error}. "
                f"{ALTERNATIVES}"
            ) from error
        _check_weight_decay(cls, spec)

    def _with_smallest_parameter(self, group: Mapping[str, object]) -> dict[str, object]:
        """Return the group with its smallest parameter only, the same one on all ranks."""
        members = {id(tensor) for tensor in cast(list[nn.Parameter], group["params"])}
        parameters = [
            parameter for parameter in self._parameters.values() if id(parameter.tensor) in members
        ]
        smallest = min(parameters, key=lambda p: (p.shape.numel(), p.name))
        return {**group, "params": [smallest.tensor]}

    @torch.no_grad()
    def _check_update(self) -> None:
        """Try one update on the current parameters and undo it.

        Collective if the optimizer class communicates in `step()`.

        Raises:
            CapabilityError: If the class cannot update shards, or keeps a state that cannot be
                saved.
        """
        members = {
            id(tensor) for group in self._optimizer.param_groups for tensor in group["params"]
        }
        parameters = [
            parameter for parameter in self._parameters.values() if id(parameter.tensor) in members
        ]
        original = [parameter.local_shard().clone() for parameter in parameters]
        for parameter in parameters:
            # A zero gradient still creates the state and runs all operators.
            parameter.tensor.grad = torch.zeros_like(parameter.tensor)
        try:
            self._optimizer.step()
            # This call raises if the class keeps a state that checkpoints cannot save.
            self.state_tensors()
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            strategy = "fsdp1" if isinstance(parameters[0], FSDP1Parameter) else "fsdp2"
            raise CapabilityError(
                f"optimizer.name {self._spec.name} cannot update parameters sharded with strategy "
                f"{strategy}: {error} {ALTERNATIVES}"
            ) from error
        for parameter, shard in zip(parameters, original, strict=True):
            parameter.tensor.grad = None
            parameter.local_shard().copy_(shard)

    def _update(self, gradients: GradientShards, *, lr: float) -> None:
        for name, gradient in gradients.items():
            parameter = self._parameters[name].tensor
            if parameter.grad is None:
                # Empty shard: its state must exist on every rank nevertheless.
                parameter.grad = gradient.clone().view_as(parameter)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def offloadable_tensors(self) -> Iterator[Tensor]:
        """See ShardedOptimizer."""
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.ndim > 0:
                    yield local_tensor(value) if isinstance(value, DTensor) else value

    def state_tensors(self) -> dict[str, StateTensor]:
        """See ShardedOptimizer. Converts numbers in the state to tensors."""
        tensors = {}
        for name, parameter in self._parameters.items():
            state = self._optimizer.state.get(parameter.tensor, {})
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    state[key] = value = torch.as_tensor(value)
                has_parameter_shape = value.ndim > 0 and value.shape == parameter.tensor.shape
                if isinstance(value, DTensor) and not has_parameter_shape:
                    raise CapabilityError(
                        f"{self._spec.name} keeps a {key} that is not sharded like its parameter, "
                        "which checkpoints cannot save: use another optimizer."
                    )
                shard = (
                    local_tensor(value)
                    if isinstance(value, DTensor)
                    else value.view(-1)
                    if has_parameter_shape
                    else value
                )
                tensors[f"{STATE_PREFIX}.{key}.{name}"] = StateTensor(
                    owner=parameter if has_parameter_shape else None, tensor=shard
                )
        return tensors

    @torch.no_grad()
    def allocate_state(self, names: list[str]) -> None:
        """See ShardedOptimizer.

        An update with gradients of zero creates the state; the weights are restored after it.
        """
        # A checkpoint before the first update has no state, because torch creates it in that step.
        if not any(name.startswith(f"{STATE_PREFIX}.") for name in names):
            self._optimizer.state.clear()
            return
        # Weight decay changes the weights in spite of zero gradients.
        original = {
            name: parameter.local_shard().clone() for name, parameter in self._parameters.items()
        }
        for parameter in self._parameters.values():
            if parameter.tensor.requires_grad:
                parameter.tensor.grad = torch.zeros_like(parameter.tensor)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for name, shard in original.items():
            self._parameters[name].local_shard().copy_(shard)


def check_optimizer(
    spec: OptimizerSpec, *, parameters: Iterable[nn.Parameter], is_flat: bool
) -> None:
    """Check that the class of an optimizer exists and accepts its arguments; allocates no states.

    Args:
        spec: Name and arguments of a torch optimizer.
        parameters: Parameters of the model, which may be on the meta device.
        is_flat: True for strategy fsdp1, which shards flat tensors.

    Raises:
        ConfigError: If there is no such class, or it takes other arguments.
        CapabilityError: If the engine cannot use the class.
    """
    cls = _load_optimizer_class(spec, is_flat=is_flat)
    build: Callable[..., torch.optim.Optimizer] = cls
    try:
        build(list(parameters), lr=spec.lr, **spec.arguments)
    except (TypeError, ValueError) as error:
        raise CapabilityError(
            f"optimizer.name {spec.name} does not accept this model's parameters: {error}. "
            f"{ALTERNATIVES}"
        ) from error
    _check_weight_decay(cls, spec)


def _load_optimizer_class(spec: OptimizerSpec, *, is_flat: bool) -> type[torch.optim.Optimizer]:
    cls = _import_optimizer(spec.name)
    # Check the class before its arguments: no arguments would make such a class usable.
    if (
        inspect.signature(cls.step).parameters.get("closure", _OPTIONAL).default
        is inspect.Parameter.empty
    ):
        raise CapabilityError(
            f"optimizer.name {spec.name} needs a closure that recomputes the loss, which this "
            f"engine does not provide. {ALTERNATIVES}"
        )
    _check_arguments(cls, spec)
    is_elementwise = cls.__module__.startswith("torch.optim.") and cls.__name__ in ELEMENTWISE
    if is_flat and not is_elementwise:
        raise CapabilityError(
            f"optimizer.name {spec.name} may need full parameters, but strategy fsdp1 shards "
            f"flat tensors: use strategy fsdp2 if it supports DTensors. {ALTERNATIVES}"
        )
    return cls


def _check_weight_decay(cls: type[torch.optim.Optimizer], spec: OptimizerSpec) -> None:
    """Check that the class has weight decay if some is set.

    Called last, so that no user is told to change a setting of an optimizer that cannot be used.
    """
    if spec.weight_decay and not _accepts(cls, "weight_decay"):
        raise ConfigError(
            f"optimizer.weight_decay is {spec.weight_decay}, but {spec.name} takes no weight "
            "decay: set it to 0."
        )


def _import_optimizer(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        candidate: object = vars(import_module(module)).get(name)
    except ImportError as error:
        raise ConfigError(
            f"optimizer.name is {path}, but {module} cannot be imported: {error}. Check the dotted "
            "path."
        ) from error
    if not (isinstance(candidate, type) and issubclass(candidate, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer.name is {path}, but {module} has no torch.optim.Optimizer of that name: "
            "check the dotted path."
        )
    return candidate


def _accepts(cls: type[torch.optim.Optimizer], name: str) -> bool:
    parameters = inspect.signature(cls).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _has_type_of(value: object, default: object) -> bool:
    """Return True if a value matches a default's type; a default of None matches anything."""
    if default is None or default is inspect.Parameter.empty or value is None:
        return True
    if isinstance(default, tuple):
        pairs = zip(value, default, strict=False) if isinstance(value, list | tuple) else ()
        return (
            isinstance(value, list | tuple)
            and len(value) == len(default)
            and all(_has_type_of(*pair) for pair in pairs)
        )
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    return (
        isinstance(value, int | float)
        if isinstance(default, int | float)
        else isinstance(value, type(default))
    )


def _check_arguments(cls: type[torch.optim.Optimizer], spec: OptimizerSpec) -> None:
    accepted = {
        name: p
        for name, p in inspect.signature(cls).parameters.items()
        if name not in ("params", "lr", "weight_decay")
    }
    for name, value in spec.arguments.items():
        if not _accepts(cls, name):
            raise ConfigError(
                f"optimizer.arguments.{name} is not an argument of {spec.name}: use "
                f"{', '.join(accepted)}."
            )
        if name in accepted and not _has_type_of(value, accepted[name].default):
            raise ConfigError(
                f"optimizer.arguments.{name} is {value!r}, but {spec.name} expects a value like "
                f"{accepted[name].default!r}."
            )
    required = [
        name
        for name, p in accepted.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing := [name for name in required if name not in spec.arguments]:
        raise ConfigError(
            f"optimizer.name {spec.name} needs optimizer.arguments.{missing[0]}, which has no "
            "default: set it."
        )
