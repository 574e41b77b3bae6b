"""Test that full shared memory fails a weight sync on every rank and leaves no files."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.rollout.packed_bucket import open_weight_file
from temper_trainer.weight_sync.shared_memory_transport import write_weight_files

NAMES = tuple("abcde")


class Rank:
    """A training worker that counts how many weights were gathered with other ranks."""

    def __init__(self, *, is_first: bool) -> None:
        self.is_first = is_first
        self.num_gathered = 0

    def export_weights(self) -> WeightStream:
        return WeightStream(self._gather())

    def _gather(self) -> Iterator[NamedWeight]:
        for name in NAMES:
            self.num_gathered += 1
            yield NamedWeight(name, torch.ones(4))


def test_weights_are_split_into_buckets(tmp_path: Path) -> None:
    buckets = write_weight_files(Rank(is_first=True), str(tmp_path / "set"), 32, True)
    assert [len(bucket.entries) for bucket in buckets] == [2, 2, 1]
    assert all(len(open_weight_file(bucket)) == bucket.num_bytes for bucket in buckets)


def test_full_memory_is_reported_after_every_rank_has_gathered_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_files, reserve = [1], os.posix_fallocate

    def reserve_once(file: int, start: int, length: int) -> None:
        if not free_files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        free_files.pop()
        reserve(file, start, length)

    monkeypatch.setattr(os, "posix_fallocate", reserve_once)
    first, other = Rank(is_first=True), Rank(is_first=False)
    with pytest.raises(
        WeightError,
        match=(
            r"\d+ bytes of weights don't fit into .*No space left on device\. Give shared "
            r"memory more room"
        ),
    ):
        write_weight_files(first, str(tmp_path / "set"), 32, False)
    write_weight_files(other, str(tmp_path / "set"), 32, False)
    assert first.num_gathered == other.num_gathered == len(NAMES)
    assert [path.name for path in tmp_path.iterdir()] == [".temper-lock"]


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rank = Rank(is_first=True)
    with pytest.raises(WeightError, match="weights cannot be written to"):
        write_weight_files(rank, str(tmp_path / "file" / "set"), 32, False)
    assert rank.num_gathered == len(NAMES)
