"""Load and call advantage estimators and policy losses that users give by import path."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.algorithms.policy_losses import SurrogateObjective
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.import_path import import_object

SHARED_FIELDS = frozenset(field.name for field in fields(SurrogateObjective))
"""Fields that keys of the configuration fill in every objective."""


def load_advantage_function(config: AlgorithmConfig) -> Callable[..., object]:
    """Import the function named by ``config.advantage`` and check its arguments.

    Raises:
        ConfigError: If it cannot be imported, or does not accept these arguments.
    """
    loaded = import_object(config.advantage, key="algorithm.advantage")
    try:
        # Only binds the arguments: a wrong name is found before the first step and without data.
        inspect.signature(loaded).bind(None, samples=None, **config.advantage_arguments)
    except TypeError as error:
        raise ConfigError(
            f"algorithm.advantage {config.advantage} cannot be called with rewards, samples and "
            f"algorithm.advantage_arguments {dict(config.advantage_arguments)}: {error}."
        ) from error
    return loaded


def compute_custom_advantages(
    config: AlgorithmConfig, *, rewards: Tensor, samples: SequenceBatch
) -> Tensor:
    """Call the user's advantage function and check its result.

    Args:
        config: Names the function and its arguments.
        rewards: [B] float64, minus the KL penalty of each sequence.
        samples: B sequences, T tokens.

    Returns:
        [B] or [T].

    Raises:
        BatchError: If it returns anything but a finite tensor of one of these shapes.
    """
    loaded: object = load_advantage_function(config)(
        rewards, samples=samples, **config.advantage_arguments
    )
    expected = ((samples.num_sequences,), (samples.num_tokens,))
    if (
        not isinstance(loaded, Tensor)
        or tuple(loaded.shape) not in expected
        # A NaN would reach every weight in the first update.
        or not bool(loaded.isfinite().all())
    ):
        got = (
            f"a tensor of shape {tuple(loaded.shape)}"
            if isinstance(loaded, Tensor)
            else f"{type(loaded).__name__}"
        )
        raise BatchError(
            f"algorithm.advantage {config.advantage} returned {got}, but must return finite "
            f"numbers: [{samples.num_sequences}], one per sequence, or [{samples.num_tokens}], "
            "one per token."
        )
    return loaded


def load_policy_loss_class(config: AlgorithmConfig) -> type[SurrogateObjective]:
    """Import the class named by ``config.policy_loss`` and check its arguments against its fields.

    Raises:
        ConfigError: If it cannot be imported, is not a SurrogateObjective, or lacks a field.
    """
    loaded: Any = import_object(config.policy_loss, key="algorithm.policy_loss")
    if not (isinstance(loaded, type) and issubclass(loaded, SurrogateObjective)):
        raise ConfigError(
            f"algorithm.policy_loss is {config.policy_loss}, which does not derive from "
            "temper_trainer.algorithms.policy_losses.SurrogateObjective: make it a subclass that "
            "implements surrogate()."
        )
    own_fields = {field.name for field in fields(loaded)} - SHARED_FIELDS
    if unknown := sorted(config.policy_loss_arguments.keys() - own_fields):
        raise ConfigError(
            f"algorithm.policy_loss_arguments names {', '.join(unknown)}, but the arguments of "
            f"{config.policy_loss} are {', '.join(sorted(own_fields)) or 'none'}."
        )
    return loaded
