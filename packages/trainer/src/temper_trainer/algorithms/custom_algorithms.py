"""Load and call advantage estimators that users give by import path."""

import inspect
from collections.abc import Callable

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.settings.import_path import import_object


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
