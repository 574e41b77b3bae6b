"""What the engine's part of a checkpoint consists of, written at once or from a copy on another thread."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from temper_engine_api.weights import NamedWeight, WeightEntry
from temper_engine_fsdp import huggingface, persistence
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.parts import Parts
from temper_engine_fsdp.runtime.numerics import dtype_named
from temper_engine_fsdp.staging import copy_to_host
from temper_engine_fsdp.weights import describe_weights

AdapterContent = tuple[Mapping[str, object], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Of one rank."""

    tensors: Mapping[str, Tensor]
    """Parameters, buffers and optimiser states, cut by rows."""
    random_states: Mapping[str, Tensor]
    """Of this rank."""
    adapter: AdapterContent | None
    """What PEFT's two files hold; None where there is no adapter."""


def write_now(parts: Parts, *, config: FSDPConfig, directory: str, weights: Iterator[NamedWeight]) -> list[str]:
    """Write the state as it is; relative paths of this rank's files. Collective.

    Args:
        parts: of the engine.
        config: its configuration.
        directory: of the checkpoint's part.
        weights: full tensors for the safetensors, consumed only where they are asked for.
    """
    pieces = persistence.training_pieces(parts.kept, parts.buffers, parts.optimizer)
    content = _content(parts, persistence.as_rows(pieces))
    return _write(content, parts, config=config, directory=directory, group=None, weights=lambda: weights)


def _content(parts: Parts, tensors: Mapping[str, Tensor]) -> _Content:
    adapter = None if parts.adapter is None else parts.adapter.export(parts.trained)
    return _Content(tensors=tensors, random_states=persistence.random_states(parts.membership.device), adapter=adapter)


def stage(parts: Parts, *, config: FSDPConfig, group: ProcessGroup, weights: Iterator[NamedWeight]) -> Callable[[str], list[str]]:
    """Copy the state to host memory; what writes the copy among threads that meet in this group. Collective.

    Args:
        parts: of the engine.
        config: its configuration.
        group: of the threads.
        weights: full tensors, consumed only where safetensors of a merged adapter are asked for: the one model that is copied whole.
    """
    pieces = persistence.training_pieces(parts.kept, parts.buffers, parts.optimizer)
    copies, wait = copy_to_host(pieces, device=parts.membership.device)
    if config.strategy == "fsdp1":
        wait()  # cutting by rows reads the copies
    content = _content(parts, persistence.as_rows(copies))
    merged: list[NamedWeight] = []
    if parts.adapter is not None and config.save_huggingface_weights:
        merged = [NamedWeight(name, tensor.cpu()) for name, tensor in weights if parts.membership.rank == 0]

    def write(directory: str) -> list[str]:
        wait()
        # Gathering would need the engine's groups; what was just written holds full tensors.
        saved = iter(merged) if parts.adapter is not None else persistence.read_weights(_entries(parts, config), directory=directory)
        return _write(content, parts, config=config, directory=directory, group=group, weights=lambda: saved)

    return write


def _write(
    content: _Content,
    parts: Parts,
    *,
    config: FSDPConfig,
    directory: str,
    group: ProcessGroup | None,
    weights: Callable[[], Iterator[NamedWeight]],
) -> list[str]:
    rank = parts.membership.rank
    files = persistence.write_tensors(content.tensors, directory=directory, rank=rank, group=group)
    # A copy is exported by one rank, from the disk; a live model is gathered, by all of them. What each rank writes alone comes after it:
    # one that fails there leaves no other rank waiting.
    if config.save_huggingface_weights and (rank == 0 or group is None):
        files += huggingface.write_weights(
            weights(), _entries(parts, config), directory=directory, is_writer=rank == 0, shard_bytes=config.huggingface_shard_bytes
        )
    files.append(persistence.write_random_states(content.random_states, directory=directory, rank=rank))
    if rank == 0:
        dtype = dtype_named(config.precision.compute)
        files += huggingface.write_description(parts.hf_config, directory=directory, source=config.model.path, dtype=dtype)
    if rank == 0 and content.adapter is not None:
        files += huggingface.write_adapter(*content.adapter, directory=directory)
    return files


def _entries(parts: Parts, config: FSDPConfig) -> list[WeightEntry]:
    return describe_weights(parts.parameters, parts.buffers, dtype=dtype_named(config.precision.compute))
