"""Warnings that Megatron-Core gives in every process and that nobody can act on: what is absent is absent on purpose."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_KNOWN = (
    # Apex and TransformerEngine are not used: the layers and the optimizer are those in plain torch.
    r"(Transformer Engine and )?Apex (is|are) not installed",
    # No mixture of experts.
    r"The \w+ GroupedMLP will be deprecated",
    r"Only transformer-engine>=[\d.]+ supports MoE experts",
    # Imported beside what is used.
    r"MimoModelConfig is experimental",
    r"absl.logging is not installed",
    # The bridge's own default.
    r"full scope is deprecated. Use empty cuda_graph_(scope|modules)",
    # torch has new names for what Megatron-Core calls.
    r"`torch.distributed.\w+` is deprecated",
)


@contextmanager
def ignore_known_warnings() -> Iterator[None]:
    """For the length of an import, of building a model or of an update; all other warnings are shown."""
    with warnings.catch_warnings():
        for message in _KNOWN:
            for category in (UserWarning, FutureWarning):
                warnings.filterwarnings("ignore", message=message, category=category)
        yield
