"""Test full weights and their delta in shared memory: reading both gives the newest weights."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.rollout.packed_bucket import PackedBucket, open_weight_file, unpack_tensors
from temper_trainer.rollout.weight_delta import (
    DeltaManifest,
    apply_delta,
    check_updated_bucket,
    open_delta_file,
)
from temper_trainer.weight_sync.shared_memory_transport import write_delta, write_weight_files

BUCKET_BYTES = 1000
FULL = DeltaManifest(version=1, base_version=1, deltas=())


class Rank:
    """A training worker: 300 float32 in four tensors, in buckets of two, one and one."""

    def __init__(self, *, is_first: bool = True) -> None:
        self.is_first = is_first
        self.num_gathered = 0
        self.weights = {
            name: torch.randn(size)
            for name, size in {"a": 100, "b": 50, "c": 250, "d": 100}.items()
        }

    def export_weights(self) -> WeightStream:
        return WeightStream(self._gather())

    def _gather(self) -> Iterator[NamedWeight]:
        for name, tensor in self.weights.items():
            self.num_gathered += 1
            yield NamedWeight(name, tensor)

    def train(self, *names: str) -> None:
        """Change some weights, as a training step does."""
        for name in names:
            self.weights[name] = self.weights[name] + torch.nn.functional.one_hot(
                torch.tensor(7), len(self.weights[name])
            )


def read(base: list[PackedBucket], manifest: DeltaManifest) -> dict[str, Tensor]:
    """Read full weights and their delta as a server does."""
    weights_by_name: dict[str, Tensor] = {}
    for bucket, changes in zip(base, manifest.deltas, strict=True):
        weights = list(unpack_tensors(open_weight_file(bucket), bucket))
        tensors = [weight.tensor for weight in weights]
        apply_delta(tensors, open_delta_file(changes), bucket.entries, changes.counts)
        check_updated_bucket(
            tensors,
            changes.updated_digest,
            version=manifest.version,
            base_version=manifest.base_version,
        )
        weights_by_name |= {weight.name: weight.tensor.clone() for weight in weights}
    return weights_by_name


def changes_of(
    rank: Rank, base: list[PackedBucket], loaded: DeltaManifest, folder: Path, *, version: int
) -> DeltaManifest:
    return write_delta(rank, base, loaded, version, str(folder), BUCKET_BYTES, True, 0.25)


def assert_read(received: dict[str, Tensor], rank: Rank) -> None:
    assert received.keys() == rank.weights.keys()
    assert all(received[name].equal(tensor) for name, tensor in rank.weights.items())


def test_files_with_their_delta_equal_the_weights_also_after_the_files_are_updated(
    tmp_path: Path,
) -> None:
    rank = Rank()
    base = write_weight_files(rank, str(tmp_path / "whole"), BUCKET_BYTES, True)
    assert [len(bucket.entries) for bucket in base] == [2, 1, 1]
    rank.train("a", "c")
    second = changes_of(rank, base, FULL, tmp_path / "2", version=2)
    assert (second.base_version, [bucket.counts for bucket in second.deltas]) == (
        1,
        [(1, 0), (1,), (0,)],
    )
    assert sorted(path.name for path in (tmp_path / "2").iterdir()) == ["00000", "00001"]
    assert_read(read(base, second), rank)
    then = {name: tensor.clone() for name, tensor in rank.weights.items()}
    rank.train("c", "d")
    third = changes_of(rank, base, second, tmp_path / "3", version=3)
    # A server that is started again before the third set is loaded reads the second one from files
    # that have it already.
    assert all(read(base, second)[name].equal(tensor) for name, tensor in then.items())
    assert (third.base_version, [bucket.counts for bucket in third.deltas]) == (
        2,
        [(0, 0), (1,), (1,)],
    )
    assert_read(read(base, third), rank)


def test_delta_that_was_not_loaded_is_computed_again_from_the_same_base(tmp_path: Path) -> None:
    rank = Rank()
    base = write_weight_files(rank, str(tmp_path / "whole"), BUCKET_BYTES, True)
    rank.train("a")
    changes_of(rank, base, FULL, tmp_path / "2", version=2)
    rank.train("a")
    again = changes_of(rank, base, FULL, tmp_path / "2", version=2)
    assert_read(read(base, again), rank)


def test_files_of_another_base_are_refused(tmp_path: Path) -> None:
    rank = Rank()
    base = write_weight_files(rank, str(tmp_path / "whole"), BUCKET_BYTES, True)
    rank.train("a")
    manifest = changes_of(rank, base, FULL, tmp_path / "2", version=2)
    with Path(str(base[0].path)).open("r+b") as file:
        file.write(b"\x01\x02\x03\x04")
    with pytest.raises(WeightError, match="weights 1 plus its delta differs from weights 2"):
        read(base, manifest)


@pytest.mark.parametrize("fault", ["shapes", "room"])
def test_error_is_raised_after_every_rank_has_gathered_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    rank, other = Rank(), Rank(is_first=False)
    base = write_weight_files(rank, str(tmp_path / "whole"), BUCKET_BYTES, True)
    rank.train("a")
    rank.num_gathered = 0
    if fault == "shapes":
        rank.weights["a"] = torch.zeros(99)
    else:

        def reserve(file: int, start: int, length: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(WeightError, match=r"other names, shapes or dtypes|No space left on device"):
        changes_of(rank, base, FULL, tmp_path / "2", version=2)
    assert changes_of(other, base, FULL, tmp_path / "2", version=2).deltas == ()
    assert rank.num_gathered == other.num_gathered == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [".temper-lock", "whole"]
