"""Read a step directory's portable training state without torch.distributed."""

from collections.abc import Iterator
from pathlib import Path

from temper_engine_api.checkpoint import ENGINE_PART, find_step
from temper_engine_api.weights import TrainingState
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.lazy import as_torch
from temper_legacy_shim.checkpoints.huggingface.joined_experts import split


def read_training_state(directory: Path) -> Iterator[TrainingState]:
    """Yield each parameter of an FSDP engine's step directory, or of ``--to temper``.

    Experts are separate, with the names in files.
    """
    tensors = DistCheckpoint(find_step(directory) / ENGINE_PART / "dcp").tensors
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "parameter":
            sides = (
                split(name, each)
                for each in (
                    tensor,
                    tensors[f"first_moment.{name}"],
                    tensors[f"second_moment.{name}"],
                )
            )
            count = int(as_torch(tensors[f"update_count.{name}"]))
            for (part, master), (_, first), (_, second) in zip(*sides, strict=True):
                yield TrainingState(
                    name=part,
                    master=as_torch(master),
                    first_moment=as_torch(first),
                    second_moment=as_torch(second),
                    update_count=count,
                )
