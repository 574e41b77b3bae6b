"""Seeds for all random choices in a run.

Each choice has its own seed, derived from what it is for. So there are no generators whose state a
checkpoint would have to save, and a resumed run draws the same numbers.
"""

import hashlib


def derive_seed(run_seed: int, purpose: str, *indices: int) -> int:
    """Return a seed in [0, 2**63) that depends only on the arguments.

    Args:
        run_seed: ``run.seed``.
        purpose: Name of the choice, such as ``sampling``.
        indices: Distinguish the choices with this purpose, such as step and sample.

    Example:
        >>> derive_seed(0, "sampling", 1, 0) == derive_seed(0, "sampling", 1, 0)
        True
        >>> derive_seed(0, "sampling", 1, 0) == derive_seed(0, "sampling", 1, 1)
        False
    """
    # `hash` would give different values in each process.
    text = ":".join([purpose, str(run_seed), *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
