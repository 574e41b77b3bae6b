"""Weights through files in shared memory, on one machine: the actor writes each bucket once, every server maps it.

The last set stays until the next one is loaded everywhere, so that a server that is started again gets it too.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

from temper_engine_api.errors import TemperError, WeightError
from temper_trainer.rollout.packed_bucket import PackedBucket, split_into_buckets, write_weight_file
from temper_trainer.rollout.replica import Replica
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.temporary_folders import find_shared_memory_root, make_folder_path
from temper_trainer.weight_sync.buckets import WeightExporter
from temper_trainer.weight_sync.transport import RankGroup, SentWeights

logger = logging.getLogger(__name__)


class AdapterExporter(Protocol):
    """A training worker with an adapter."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of its role."""
        ...

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """PEFT's configuration and tensors; collective."""
        ...


class SharedMemoryTransport:
    """Whole sets of weights; see the module."""

    def __init__(
        self, *, actor: RankGroup, sampler: VllmSampler, bucket_bytes: int, with_digest: bool
    ) -> None:
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest
        self._folder = choose_weight_folder(actor)
        self._previous: Path | None = None

    def send(self, version: int) -> SentWeights:
        """Write every bucket, let every server map them, remove the set before."""
        folder = self._folder / f"version-{version}"
        arguments = (str(folder), self._bucket_bytes, self._with_digest)
        parcels = self._actor.run(write_weight_files, [arguments] * self._actor.num_workers)[0]

        def load(replica: Replica) -> "Future[object]":
            return replica.call("load_files", parcels, version)

        self._sampler.load(load, version=version)
        self._remove_previous()
        self._previous = folder
        return SentWeights(num_bytes=sum(parcel.num_bytes for parcel in parcels), fraction=1.0)

    def close(self) -> None:
        """Remove the files."""
        remove_weight_folder(self._folder, actor=self._actor)

    def _remove_previous(self) -> None:
        if self._previous is not None:
            self._actor.run(remove_folder, [(str(self._previous),)] * self._actor.num_workers)
            self._previous = None


class AdapterTransport:
    """The LoRA adapter alone, as a PEFT directory in shared memory, under a new version each time."""

    def __init__(self, *, actor: RankGroup, sampler: VllmSampler) -> None:
        self._actor = actor
        self._sampler = sampler
        self._folder = choose_weight_folder(actor)
        self._previous: Path | None = None

    def send(self, version: int) -> SentWeights:
        """Write the adapter, load it everywhere, remove the one before."""
        folder = self._folder / f"version-{version}"
        num_bytes = self._actor.run(write_adapter, [(str(folder),)] * self._actor.num_workers)[0]
        if not num_bytes:
            raise WeightError(
                "the actor's adapter has no tensors: look at actor.engine.lora.target_modules."
            )

        def load(replica: Replica) -> "Future[object]":
            return replica.call("load_adapter", str(folder), version)

        self._sampler.load(load, version=version)
        if self._previous is not None:
            self._actor.run(remove_folder, [(str(self._previous),)] * self._actor.num_workers)
        self._previous = folder
        return SentWeights(num_bytes=num_bytes, fraction=1.0)

    def close(self) -> None:
        """Remove the files."""
        remove_weight_folder(self._folder, actor=self._actor)


def write_weight_files(
    worker: WeightExporter, folder: str, bucket_bytes: int, with_digest: bool
) -> list[PackedBucket]:
    """Runs on every rank of the actor: rank 0 writes the buckets, the others take part in the gathering and return nothing.

    Raises:
        WeightError: there is no room for them; raised once every rank has been through the whole stream, so that none is left waiting.
    """
    with worker.export_weights() as stream:
        if not worker.is_first:
            for _ in stream:
                pass
            return []
        try:
            recreate_folder(Path(folder))
            parts = enumerate(split_into_buckets(stream, bucket_bytes=bucket_bytes))
            return [
                write_weight_file(part, Path(folder) / f"{i:05d}", with_digest=with_digest)
                for i, part in parts
            ]
        except (WeightError, OSError) as error:
            for _ in stream:
                pass
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise WeightError(
                    f"weights can't be written into {folder}: {error.strerror}."
                ) from error
            raise


def write_adapter(worker: AdapterExporter, folder: str) -> int:
    """Runs on every rank of the actor: rank 0 writes PEFT's two files; returns the bytes of its tensors."""
    config, tensors = worker.export_adapter()
    if worker.is_first:
        recreate_folder(Path(folder))
        (Path(folder) / "adapter_config.json").write_text(json.dumps(dict(config)))
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def remove_folder(worker: WeightExporter, folder: str) -> None:
    """Runs on every rank of the actor; only what this run has written lies there."""
    if worker.is_first:
        shutil.rmtree(folder, ignore_errors=True)


def remove_weight_folder(folder: Path, *, actor: RankGroup) -> None:
    """From here, where the actor may have died, and from the actor's machine, where that is another one."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        actor.run(remove_folder, [(str(folder),)] * actor.num_workers)
    except TemperError as error:
        logger.warning("the actor can't remove the weights in %s any more: %s", folder, error)


def recreate_folder(folder: Path) -> None:
    """An empty folder for one set; what a failed attempt at the same version left is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)


def choose_weight_folder(actor: RankGroup) -> Path:
    """Return a folder in shared memory that belongs to the process of the actor's rank 0.

    What earlier runs left there is removed if their process is dead.
    """
    return Path(actor.run(_name_folder, [()] * actor.num_workers)[0])


def _name_folder(worker: WeightExporter) -> str:
    """Runs on every rank of the actor; rank 0's answer counts, because that process writes."""
    return (
        str(make_folder_path("weights", root=find_shared_memory_root())) if worker.is_first else ""
    )
