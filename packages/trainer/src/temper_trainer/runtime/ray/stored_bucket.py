"""Weights from rank 0 of the actor to the sampler's actor, through Ray's object store: written there once, and mapped where they are read.

Neither the driver nor a pickled string ever holds them, so a tensor, however large, exists once between the engine's and the sampler's.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, WeightEntry
from temper_trainer.rollout.packed_bucket import compute_digest, split_into_buckets
from temper_trainer.runtime.training_worker import TrainingWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBucket:
    """One bucket as the object store takes it: arrays, which Ray copies into shared memory as they are and maps from there."""

    index: int
    """Place in the set, from 0."""
    entries: tuple[WeightEntry, ...]
    """Name, shape and dtype of each tensor."""
    arrays: tuple[NDArray[np.uint8], ...]
    """Bytes of each tensor; the sender's are the parameters' own memory where that is contiguous and on the host."""
    digests: tuple[int, ...] | None
    """See ``digest_of``; None is unchecked."""

    def weights(self) -> list[NamedWeight]:
        """Views of the arrays, which must not be written to.

        Raises:
            WeightError: a tensor arrived damaged.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*not writable.*"
            )  # what is mapped from the store is read only, and only read
            data = [torch.from_numpy(array) for array in self.arrays]
        for entry, one, digest in zip(
            self.entries, data, self.digests or [None] * len(data), strict=True
        ):
            if digest is not None and compute_digest(one) != digest:
                raise WeightError(
                    f"{entry.name} arrived damaged (checksum differs): publish the weights again."
                )
        return [
            NamedWeight(entry.name, one.view(entry.dtype).view(entry.shape))
            for entry, one in zip(self.entries, data, strict=True)
        ]


def make_stored_bucket(
    part: Sequence[NamedWeight], *, index: int, with_digest: bool
) -> StoredBucket:
    """A bucket of weights, copied only where they are on a device or not contiguous."""
    data = [weight.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for weight in part]
    return StoredBucket(
        index=index,
        entries=tuple(
            WeightEntry(name=w.name, shape=tuple(w.tensor.shape), dtype=w.tensor.dtype)
            for w in part
        ),
        arrays=tuple(one.numpy() for one in data),
        digests=tuple(map(compute_digest, data)) if with_digest else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverResult:
    """What a rank gave away."""

    given: tuple[object, ...] = ()
    """What was returned for each bucket."""
    num_bytes: int = 0
    """Of all buckets."""


def hand_over_weights(
    worker: TrainingWorker,
    give: Callable[[StoredBucket], object],
    bucket_bytes: int,
    with_digest: bool,
) -> HandoverResult:
    """Runs on every rank of the actor: rank 0 gives away bucket after bucket, the others take part in the gathering."""
    given, num_bytes = [], 0
    with worker.export_weights() as stream:
        try:
            if worker.is_first:
                for index, part in enumerate(split_into_buckets(stream, bucket_bytes=bucket_bytes)):
                    bucket = make_stored_bucket(part, index=index, with_digest=with_digest)
                    num_bytes += sum(array.nbytes for array in bucket.arrays)
                    given.append(give(bucket))
        finally:
            # On other ranks all of it, on rank 0 what an error has left: nobody may be left waiting in a gathering.
            for _ in stream:
                pass
    return HandoverResult(given=tuple(given), num_bytes=num_bytes)
