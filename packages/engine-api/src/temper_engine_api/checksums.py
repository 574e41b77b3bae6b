"""Checksums of files and weights: BLAKE3 for new ones, and SHA-256 of earlier versions.

A checksum is text that names its algorithm, such as ``blake3:6437b3ac...``.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from blake3 import blake3


class _Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


_ALGORITHMS: Mapping[str, Callable[[], _Digest]] = {"blake3": blake3, "sha256": hashlib.sha256}
_DEFAULT = "blake3"
_BLOCK_BYTES = 1 << 20


class RunningChecksum:
    """Checksum of data that arrives in pieces.

    Example:
        >>> checksum = RunningChecksum(b"a")
        >>> checksum.update(b"bc")
        >>> str(checksum)[:20]
        'blake3:6437b3ac38465'
    """

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._digest = _ALGORITHMS[_DEFAULT]()
        self.update(data)

    def update(self, data: bytes | memoryview) -> None:
        """Add data. Releases the interpreter lock while it computes."""
        self._digest.update(data)

    def __str__(self) -> str:
        """Return the checksum of the data so far."""
        return f"{_DEFAULT}:{self._digest.hexdigest()}"


def compute_file_checksum(path: Path) -> str:
    """Return the checksum of a file's content."""
    return _hash_file(path, _DEFAULT)


def has_checksum(path: Path, expected: str) -> bool:
    """Return True if a file has this checksum; one of an unknown algorithm never matches."""
    algorithm = expected.partition(":")[0]
    return algorithm in _ALGORITHMS and _hash_file(path, algorithm) == expected


def _hash_file(path: Path, algorithm: str) -> str:
    # Neither update_mmap nor several threads. A mapped file that is cut off or cannot be read kills
    # the process, where a read raises OSError. One thread hashes faster than disks deliver, and the
    # ranks of a host hash their files at the same time.
    digest, block = _ALGORITHMS[algorithm](), memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return f"{algorithm}:{digest.hexdigest()}"
