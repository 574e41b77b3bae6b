"""Estimators and objectives of a user's own, found by import path and asked in the places of the named ones."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.algorithms.surrogate import SurrogateObjective
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.import_path import import_object

SHARED = frozenset(field.name for field in fields(SurrogateObjective))
"""Fields that keys of the configuration fill in every objective."""


def load_advantage_function(config: AlgorithmConfig) -> Callable[..., object]:
    """The function that ``config.advantage`` names, its arguments checked against its signature.

    Raises:
        ConfigError: it can't be imported, or can't be called with these arguments.
    """
    found = import_object(config.advantage, key="algorithm.advantage")
    try:
        inspect.signature(found).bind(None, samples=None, **config.advantage_arguments)
    except TypeError as error:
        raise ConfigError(
            f"algorithm.advantage {config.advantage} can't be called with rewards, samples and algorithm.advantage_arguments "
            f"{dict(config.advantage_arguments)}: {error}."
        ) from error
    return found


def compute_custom_advantages(
    config: AlgorithmConfig, *, rewards: Tensor, samples: SequenceBatch
) -> Tensor:
    """Its numbers by sequence or by token.

    Args:
        config: which function, and its arguments.
        rewards: [B] float64, less the KL penalty of each sequence.
        samples: B sequences, T tokens.

    Returns:
        [B] or [T].

    Raises:
        BatchError: it returned something else, or a number that is not finite.
    """
    found: object = load_advantage_function(config)(
        rewards, samples=samples, **config.advantage_arguments
    )
    expected = ((samples.num_sequences,), (samples.num_tokens,))
    if (
        not isinstance(found, Tensor)
        or tuple(found.shape) not in expected
        or not bool(found.isfinite().all())
    ):
        got = (
            f"a tensor of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else f"{type(found).__name__}"
        )
        raise BatchError(
            f"algorithm.advantage {config.advantage} returned {got}, but must return finite numbers: [{samples.num_sequences}], one by "
            f"sequence, or [{samples.num_tokens}], one by token."
        )
    return found


def load_policy_loss_class(config: AlgorithmConfig) -> type[SurrogateObjective]:
    """The class that ``config.policy_loss`` names, its arguments checked against its fields.

    Raises:
        ConfigError: it can't be imported, is no SurrogateObjective, or an argument is none of its own fields.
    """
    found: Any = import_object(config.policy_loss, key="algorithm.policy_loss")
    if not (isinstance(found, type) and issubclass(found, SurrogateObjective)):
        raise ConfigError(
            f"algorithm.policy_loss is {config.policy_loss}, which does not derive from "
            "temper_trainer.algorithms.surrogate.SurrogateObjective: derive it, and write its surrogate()."
        )
    own = {field.name for field in fields(found)} - SHARED
    if unknown := sorted(config.policy_loss_arguments.keys() - own):
        raise ConfigError(
            f"algorithm.policy_loss_arguments names {', '.join(unknown)}, but {config.policy_loss} has the fields "
            f"{', '.join(sorted(own)) or 'none'} of its own."
        )
    return found
