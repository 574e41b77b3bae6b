"""A transformers sampler in a Ray actor, and its weights through Ray's object store.

Rank 0 of the training actor writes each bucket into the object store once, and the sampler's
process maps it from there. The driver never has a copy.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight, WeightEntry
from temper_trainer.config.rollout import RolloutConfig
from temper_trainer.redaction import redact_standard_streams
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.rollout.packed_bucket import compute_digest, split_into_buckets
from temper_trainer.rollout.weight_delta import DeltaBucket
from temper_trainer.runtime.ray.ray_calls import RemoteMethod, report_full_store, wait_for_all
from temper_trainer.runtime.worker_group import TrainingWorker, WorkerGroup
from temper_trainer.types import Completion, SamplingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBucket:
    """One bucket for the object store, as NumPy arrays: Ray maps these instead of copying them."""

    index: int
    """Position in the set, from 0."""
    entries: tuple[WeightEntry, ...]
    """Each tensor's name, shape and dtype."""
    arrays: tuple[NDArray[np.uint8], ...]
    """Bytes of each tensor. The sender's are views of a parameter that is contiguous on the CPU."""
    digests: tuple[int, ...] | None
    """Checksum of each tensor, see `compute_digest`; None if checksums are off."""

    def unpack_weights(self) -> list[NamedWeight]:
        """Return views of the arrays, which must not be written to.

        Raises:
            WeightError: If a tensor arrived damaged.
        """
        with warnings.catch_warnings():
            # Arrays from the store are read-only, and torch warns because tensors are writable.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            data = [torch.from_numpy(array) for array in self.arrays]
        for entry, tensor_bytes, digest in zip(
            self.entries, data, self.digests or [None] * len(data), strict=True
        ):
            if digest is not None and compute_digest(tensor_bytes) != digest:
                raise WeightError(
                    f"{entry.name} arrived damaged (checksum differs): publish the weights again."
                )
        return [
            NamedWeight(entry.name, tensor_bytes.view(entry.dtype).view(entry.shape))
            for entry, tensor_bytes in zip(self.entries, data, strict=True)
        ]


def make_stored_bucket(
    weights: Sequence[NamedWeight], *, index: int, with_digest: bool
) -> StoredBucket:
    """Make a bucket; tensors are copied only if they are on a device or not contiguous."""
    data = [w.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for w in weights]
    return StoredBucket(
        index=index,
        entries=tuple(
            WeightEntry(name=w.name, shape=tuple(w.tensor.shape), dtype=w.tensor.dtype)
            for w in weights
        ),
        arrays=tuple(tensor_bytes.numpy() for tensor_bytes in data),
        digests=tuple(map(compute_digest, data)) if with_digest else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverResult:
    """The buckets that a rank has handed over."""

    refs: tuple[object, ...] = ()
    """Return value of `give` for each bucket."""
    num_bytes: int = 0


def hand_over_weights(
    worker: TrainingWorker,
    give: Callable[[StoredBucket], object],
    bucket_bytes: int,
    with_digest: bool,
) -> HandoverResult:
    """Call `give` with every bucket on rank 0; runs on every rank of the training actor."""
    refs, num_bytes = [], 0
    with worker.export_weights() as stream:
        try:
            if worker.is_first:
                for index, weights in enumerate(
                    split_into_buckets(stream, bucket_bytes=bucket_bytes)
                ):
                    bucket = make_stored_bucket(weights, index=index, with_digest=with_digest)
                    num_bytes += sum(array.nbytes for array in bucket.arrays)
                    refs.append(give(bucket))
        finally:
            # On other ranks the full stream, on rank 0 the rest after an error: every rank has to
            # take part in all gathers.
            for _ in stream:
                pass
    return HandoverResult(refs=tuple(refs), num_bytes=num_bytes)


class SamplerHandle(Protocol):
    """Methods of a Ray handle to a SamplerActor."""

    call: RemoteMethod
    stage_bucket: RemoteMethod
    load_staged: RemoteMethod
    stage_delta: RemoteMethod
    load_staged_delta: RemoteMethod


class SamplerActor:
    """The sampler in its own process."""

    def __init__(
        self,
        model: ModelSpec,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        num_threads: int | None,
    ) -> None:
        redact_standard_streams()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._sampler = HfSampler(model=model, tokenizer=tokenizer, config=config)
        self._staged: dict[int, list[NamedWeight]] = {}
        self._staged_delta: list[DeltaBucket] = []

    def call(self, function: Callable[..., object], arguments: tuple[object, ...]) -> object:
        """Call a sampler function."""
        return function(self._sampler, *arguments)

    def stage_bucket(self, bucket: StoredBucket) -> None:
        """Keep a bucket, which stays in the object store, until all have arrived."""
        self._staged[bucket.index] = bucket.unpack_weights()

    def load_staged(self, count: int, version: int) -> int:
        """Load the staged buckets; return the sampler's version."""
        staged, self._staged = self._staged, {}
        if set(staged) != set(range(count)):
            raise WeightError(
                f"the sampler received {len(staged)} of {count} weight buckets: publish the "
                "weights again."
            )
        self._sampler.load_weights(
            (weight for i in range(count) for weight in staged[i]), version=version
        )
        return self._sampler.weight_version

    def stage_delta(self, bucket: DeltaBucket) -> None:
        """Keep the delta of a bucket until all have arrived."""
        self._staged_delta += [bucket]

    def load_staged_delta(self, base_version: int, version: int) -> int:
        """Apply the staged delta; return the sampler's version."""
        buckets, self._staged_delta = self._staged_delta, []
        self._sampler.load_delta(buckets, base_version=base_version, version=version)
        return self._sampler.weight_version


class _BucketSender:
    """Sends buckets to the sampler's actor; it is serialized and runs on rank 0 of the actor."""

    def __init__(self, sampler: SamplerHandle) -> None:
        self._sampler = sampler

    def __call__(self, bucket: StoredBucket) -> "ray.ObjectRef[object]":
        """Put a bucket into the object store."""
        with report_full_store("rollout: receive weights"):
            return self._sampler.stage_bucket.remote(bucket)


class RaySampler:
    """A Sampler whose work is done by a SamplerActor."""

    def __init__(self, actor: SamplerHandle, *, timeout_s: float) -> None:
        self._actor = actor
        self._timeout_s = timeout_s
        self._version = -1

    @property
    def weight_version(self) -> int:
        """Version that the actor reported after the last publish."""
        return self._version

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return one completion per request; see Sampler."""
        return cast("list[Completion]", self._call(HfSampler.sample, list(requests)))

    def compute_logprobs(
        self, tokens: Sequence[Sequence[int]], *, temperature: float
    ) -> list[list[float]]:
        """Return the log-prob of every token but the first; see Sampler."""
        return cast(
            "list[list[float]]",
            self._call(_call_logprobs, [tuple(row) for row in tokens], temperature),
        )

    def interrupt(self) -> None:
        """Interrupt open calls; see InterruptibleSampler."""
        self._call(HfSampler.interrupt)

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Refuse: the training actor sends weights to the sampler's process, past the driver.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("the sampler on Ray fetches weights from the actor, not as a stream.")

    def fetch_weights(
        self, actor: WorkerGroup, *, bucket_bytes: int, with_digest: bool, version: int
    ) -> int:
        """Let rank 0 of the actor write all weights into the object store, and load them.

        Returns:
            Their size in bytes.
        """
        result = actor.run_on_all(
            hand_over_weights, _BucketSender(self._actor), bucket_bytes, with_digest
        )[0]
        refs = cast("Sequence[ray.ObjectRef[object]]", result.refs)
        wait_for_all(refs, timeout_s=self._timeout_s, call="rollout: receive weights")
        ref = self._actor.load_staged.remote(len(refs), version)
        (loaded,) = wait_for_all([ref], timeout_s=self._timeout_s, call="rollout: load weights")
        self._version = cast("int", loaded)
        return result.num_bytes

    def load_delta(
        self, buckets: Sequence[DeltaBucket], *, base_version: int, version: int
    ) -> None:
        """Send a delta bucket by bucket; the actor applies it when all have arrived."""
        for bucket in buckets:
            with report_full_store("rollout: receive delta"):
                ref = self._actor.stage_delta.remote(bucket)
            wait_for_all([ref], timeout_s=self._timeout_s, call="rollout: receive delta")
        ref = self._actor.load_staged_delta.remote(base_version, version)
        (loaded,) = wait_for_all([ref], timeout_s=self._timeout_s, call="rollout: load delta")
        self._version = cast("int", loaded)

    def close(self) -> None:
        """Kill the actor."""
        ray.kill(self._actor)

    def _call(self, function: Callable[..., object], *arguments: object) -> object:
        name = f"rollout: {function.__qualname__}"
        with report_full_store(name):
            ref = self._actor.call.remote(function, arguments)
        (result,) = wait_for_all([ref], timeout_s=self._timeout_s, call=name)
        return result


def _call_logprobs(
    sampler: HfSampler, tokens: Sequence[Sequence[int]], temperature: float
) -> list[list[float]]:
    # A Ray call passes only positional arguments.
    return sampler.compute_logprobs(tokens, temperature=temperature)
