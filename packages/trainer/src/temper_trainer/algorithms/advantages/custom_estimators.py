"""Load and call advantage estimators that users give by import path."""

import inspect
from collections.abc import Callable

from torch import Tensor

from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.algorithms.advantages.estimators.estimator import StepRewards
from temper_trainer.settings.names import import_object
from temper_trainer.settings.variants import Custom


def load_advantage_function(custom: Custom) -> Callable[..., object]:
    """Import a function of ``algorithm.advantage`` and check its arguments.

    Raises:
        ConfigError: If it cannot be imported, or does not accept these arguments.
    """
    loaded = import_object(custom.name, key="algorithm.advantage")
    try:
        # Bind the arguments without a call, so that a wrong name is found before the first step.
        inspect.signature(loaded).bind(None, samples=None, **custom.arguments)
    except TypeError as error:
        raise ConfigError(
            f"algorithm.advantage {custom.name} cannot be called with rewards, samples and "
            f"algorithm.advantage.arguments {dict(custom.arguments)}: {error}."
        ) from error
    return loaded


def compute_custom_advantages(custom: Custom, *, step: StepRewards) -> Tensor:
    """Call the user's advantage function and check its result.

    Args:
        custom: Names the function and its arguments.
        step: Samples and rewards.

    Returns:
        [B] or [T].

    Raises:
        BatchError: If it returns anything but a finite tensor with one of these shapes.
    """
    samples = step.samples
    loaded: object = load_advantage_function(custom)(
        step.rewards, samples=samples, **custom.arguments
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
            f"algorithm.advantage {custom.name} returned {got}, but must return finite "
            f"numbers: [{samples.num_sequences}], one per sequence, or [{samples.num_tokens}], "
            "one per token."
        )
    return loaded
