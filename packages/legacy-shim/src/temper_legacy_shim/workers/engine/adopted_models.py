"""Turn an old class's arguments into an engine, given or built around a model."""

import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError
from temper_engine_api.process_folders import make_temporary_folder
from temper_engine_api.registry import load_engine_class
from temper_engine_api.specs import EngineConfig, ModelSpec, ModelType, OptimizerSpec, PrecisionSpec
from temper_engine_api.weights import NamedWeight
from temper_legacy_shim.workers.batches.updates import set_rate

NEVER = 10**9
"""Skips the old classes passed over before stopping: they never stopped."""


class Adopted:
    """An engine, and the user's model, if given, which lends it its weights."""

    def __init__(
        self,
        engine: BaseEngine,
        *,
        module: PreTrainedModel | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        folder: str | None = None,
    ) -> None:
        self.engine = engine
        if folder is not None:
            # Kept for the life of the engine, which copies tokenizer and config files from it when
            # it saves.
            weakref.finalize(engine, shutil.rmtree, folder, ignore_errors=True)
        self._module = module
        self._optimizer = optimizer
        self._versions: dict[str, int] = {} if module is None else _versions(module)

    @contextmanager
    def weights_of_module(self) -> Iterator[None]:
        """Run the body with the module's weights in the engine, loaded again if they changed."""
        if self._module is not None and _versions(self._module) != self._versions:
            self.engine.load_weights(
                NamedWeight(name, tensor) for name, tensor in _weights(self._module)
            )
            self._versions = _versions(self._module)
        yield

    @contextmanager
    def trained(self) -> Iterator[None]:
        """Run updates at the current learning rate, then give the weights to the module."""
        with self.weights_of_module():
            if self._optimizer is not None:
                set_rate(self.engine, float(self._optimizer.param_groups[0]["lr"]))
            yield
        if self._module is not None:
            own = dict(_weights(self._module))
            # In place, so that references of the user's code to these tensors stay valid.
            with torch.no_grad(), self.engine.export_weights() as stream:
                for name, tensor in stream:
                    own[name].copy_(tensor)
            self._versions = _versions(self._module)


class ConfigureEngine(Protocol):
    """Builds the configuration of an adopted model's engine."""

    def __call__(
        self, *, model: ModelSpec, optimizer: OptimizerSpec | None, precision: PrecisionSpec
    ) -> EngineConfig:
        """Return the configuration, of the class its engine takes."""


def adopt(
    module: nn.Module | BaseEngine,
    optimizer: torch.optim.Optimizer | None,
    *,
    grad_clip: float | None,
    model_type: ModelType,
    engine_name: str,
    configure: ConfigureEngine,
) -> Adopted:
    """Build the engine for the arguments of an old constructor. Collective.

    Args:
        module: an initialized engine, or a plain Hugging Face model.
        optimizer: of that model.
        grad_clip: largest gradient norm.
        model_type: the head.
        engine_name: of the engine that a model is put behind.
        configure: its configuration.

    Raises:
        ConfigError: an engine cannot use the module or optimizer; the message shows alternatives.
    """
    if isinstance(module, BaseEngine):
        if optimizer is not None:
            raise ConfigError(
                "an engine brings its own optimizer: pass None, and configure it in the engine's "
                "config."
            )
        if module.model_type != model_type:
            raise ConfigError(
                f"the engine's model is a {module.model_type}, but this class trains a "
                f"{model_type}."
            )
        return Adopted(module)
    # The engine loads from files and shards by itself; a wrapped model has only local shards.
    if not isinstance(module, PreTrainedModel) or any(
        _is_sharded(part) for part in module.modules()
    ):
        raise ConfigError(
            f"the module is a {type(module).__name__}: pass the plain Hugging Face model, which "
            "the engine shards itself, or an initialized engine."
        )
    # Its name contains this process, so that a later one removes it if this one is killed.
    folder = str(make_temporary_folder("adopted"))
    try:
        module.save_pretrained(folder)
        config = configure(
            model=ModelSpec(path=folder, model_type=model_type),
            optimizer=None if optimizer is None else optimizer_spec(optimizer, grad_clip=grad_clip),
            precision=PrecisionSpec(compute="bf16" if module.dtype == torch.bfloat16 else "fp32"),
        )
        engine = load_engine_class(engine_name)(config)
        engine.init_model()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Adopted(engine, module=module, optimizer=optimizer, folder=folder)


def optimizer_spec(optimizer: torch.optim.Optimizer, *, grad_clip: float | None) -> OptimizerSpec:
    """Return the settings of a torch AdamW with one parameter group.

    Raises:
        ConfigError: another optimizer, or several groups.
    """
    groups = optimizer.param_groups
    if (
        type(optimizer) is not torch.optim.AdamW
        or len(groups) != 1
        or groups[0]["amsgrad"]
        or groups[0]["maximize"]
    ):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__} with {len(groups)} parameter groups: "
            "pass torch.optim.AdamW with one group and "
            "neither amsgrad nor maximize, which is what engines compute."
        )
    if optimizer.state:
        raise ConfigError(
            "the optimizer has already made steps, whose moments an engine can't take over: pass a "
            "fresh one."
        )
    (group,) = groups
    beta1, beta2 = group["betas"]
    return OptimizerSpec(
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decays_vectors=True,
        clip_grad_norm=grad_clip,
        max_consecutive_skips=NEVER,
    )


def _is_sharded(part: nn.Module) -> bool:
    return any(
        cls.__name__ in ("FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel")
        for cls in type(part).__mro__
    )


def _weights(module: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, tied ones once, and persistent buffers."""
    # Non-persistent buffers, such as rotary frequencies, are computed again at load.
    persistent = module.state_dict().keys()
    yield from ((name, parameter.data) for name, parameter in module.named_parameters())
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _versions(module: PreTrainedModel) -> dict[str, int]:
    """Return a number per parameter that changes with it."""
    # torch counts the changes of a tensor in place. A new tensor starts at 0, so its address
    # counts, too.
    return {
        name: hash((parameter._version, parameter.data_ptr()))
        for name, parameter in module.named_parameters()
    }
