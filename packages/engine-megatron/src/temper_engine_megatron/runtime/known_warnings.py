"""Warnings that Megatron-Core emits in every process and that a user cannot act on."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_KNOWN_WARNINGS = (
    # The warning is about kernels that are not used here: the layers and the optimizer are plain
    # torch.
    r"(Transformer Engine and )?Apex (is|are) not installed",
    # GroupedMLP is imported even for dense models.
    r"The \w+ GroupedMLP will be deprecated",
    r"Only transformer-engine>=[\d.]+ supports MoE experts",
    # Imported together with the modules that are used.
    r"MimoModelConfig is experimental",
    r"absl.logging is not installed",
    # A default that Megatron-Bridge sets itself.
    r"full scope is deprecated. Use empty cuda_graph_(scope|modules)",
    # Functions that torch has renamed and Megatron-Core still calls.
    r"`torch.distributed.\w+` is deprecated",
    # A module that TransformerEngine has renamed and Megatron-Core still imports.
    r"Using deprecated internal API from Transformer Engine",
)


@contextmanager
def ignore_known_warnings() -> Iterator[None]:
    """Ignore these warnings inside the context; all others are still shown.

    Use it around importing Megatron-Core, building a model and updating it.
    """
    with warnings.catch_warnings():
        for message in _KNOWN_WARNINGS:
            for category in (UserWarning, FutureWarning, DeprecationWarning):
                warnings.filterwarnings("ignore", message=message, category=category)
        yield
