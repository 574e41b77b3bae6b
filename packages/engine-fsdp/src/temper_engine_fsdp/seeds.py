"""First values that depend on a seed alone, drawn beside the process's own streams of random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Numbers of this seed inside, and after it those that the process would have drawn without it.

    On the CPU, where first values are made: ``torch.manual_seed`` would seed every GPU too, and to keep their states takes memory on each
    of them, also on those of other ranks.
    """
    with torch.random.fork_rng(devices=[]):
        begin_again(seed)
        yield


def begin_again(seed: int) -> None:
    """The stream of a seed from its first number, inside ``seeded``."""
    torch.default_generator.manual_seed(seed)
