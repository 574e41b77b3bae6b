"""Every random choice of a run as a pure function of (run.seed, what, step, index): nothing to save, nothing to restore."""

import hashlib


def derive_seed(run_seed: int, what: str, *place: int) -> int:
    """A seed in [0, 2**63) for one choice; different for different arguments, the same on every machine."""
    text = ":".join([what, str(run_seed), *map(str, place)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
