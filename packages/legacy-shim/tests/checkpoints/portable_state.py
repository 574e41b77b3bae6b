"""Read a step directory's portable training state without torch.distributed."""

from collections.abc import Iterator
from pathlib import Path

import torch

from temper_engine_api.checkpoint import ENGINE_PART, find_step
from temper_engine_api.weights import TrainingState
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.lazy import as_torch


def read_training_state(directory: Path) -> Iterator[TrainingState]:
    """Yield each parameter of an FSDP engine's step directory, or of ``--to temper``.

    Experts are separate, with the names in files.
    """
    tensors = DistCheckpoint(find_step(directory) / ENGINE_PART / "dcp").tensors
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "parameter":
            sides = (
                _separate_experts(name, as_torch(each))
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
                    master=master,
                    first_moment=first,
                    second_moment=second,
                    update_count=count,
                )


def _separate_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor by names in files: joined experts [E, rows, columns] one by one."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        yield name, tensor
        return
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    for expert, matrices in enumerate(tensor):
        for part, matrix in zip(kinds, matrices.chunk(len(kinds)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", matrix
