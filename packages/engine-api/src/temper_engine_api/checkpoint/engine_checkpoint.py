"""Saving and loading with one engine as the only participant; every rank calls these together.

Rank 0 begins and commits; the others learn the paths, and every failure, through ``gather``, so that all ranks raise the same error.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from temper_engine_api.checkpoint.manifest import (
    MANIFEST_NAME,
    ManifestInfo,
    config_hash,
    read_manifest,
    topology_sizes,
    verify,
)
from temper_engine_api.checkpoint.part_files import PartReport
from temper_engine_api.checkpoint.remote_copy import download, upload
from temper_engine_api.checkpoint.step_directories import (
    MARKER_NAME,
    find_step,
    lock_for_reading,
    prune,
    remove_step,
)
from temper_engine_api.checkpoint.transaction import CheckpointTransaction, begin_checkpoint
from temper_engine_api.errors import CheckpointError, ConfigError, TemperError
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology

logger = logging.getLogger(__name__)

ENGINE_PART = "engine"
"""Name of the part of an engine that saves alone."""

T = TypeVar("T")


class Gather(Protocol):
    """A small picklable object of every rank, in rank order, on every rank."""

    def __call__(self, item: T, /) -> list[T]:
        """Collective."""


class Participant(Protocol):
    """What is used of an engine."""

    @property
    def config(self) -> EngineConfig:
        """Its configuration, for the hash."""

    @property
    def topology(self) -> Topology:
        """Where this rank stands."""

    def write_part(self, directory: str) -> PartReport:
        """Write this rank's files. Collective."""

    def read_part(self, directory: str) -> None:
        """Read them again. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome(Generic[T]):
    """What became of an action on one rank."""

    value: T | None = None
    error: TemperError | None = None


def save_engine_checkpoint(
    engine: Participant,
    *,
    local_path: str,
    remote_url: str | None,
    step: int,
    max_to_keep: int | None,
    gather: Gather,
) -> str:
    """One transaction with this engine as its only participant. Collective.

    Args:
        engine: on each rank its own.
        local_path: folder of step directories, on a file system that every rank sees.
        remote_url: fsspec URL of a folder of step directories that receives a copy after the commit; None keeps it local.
        step: global step.
        max_to_keep: complete steps to keep in local_path; None keeps all.
        gather: over the engine's ranks.

    Returns:
        The committed step directory.

    Raises:
        CheckpointError: the step exists, a rank can't see local_path, or writing failed; earlier steps are untouched.
    """
    if max_to_keep is not None and max_to_keep < 1:
        raise ConfigError(
            f"max_ckpt_to_keep is {max_to_keep}, but at least 1 is kept: null keeps all."
        )
    rank = engine.topology.global_rank
    transaction = _on_rank_zero(
        lambda: begin_checkpoint(local_path, step), rank=rank, gather=gather
    )
    with ExitStack() as undo:
        if rank == 0:
            undo.enter_context(transaction)
        _check_seen(transaction.staging / MARKER_NAME, gather)
        reports = _write(engine, transaction, gather)
        final = _on_rank_zero(
            lambda: _commit(engine, transaction, reports), rank=rank, gather=gather
        )
    if remote_url is not None:
        _on_rank_zero(lambda: upload(final, remote_url), rank=rank, gather=gather)
    if max_to_keep is not None:
        _on_rank_zero(lambda: prune(local_path, max_to_keep=max_to_keep), rank=rank, gather=gather)
    return str(final)


def load_engine_checkpoint(
    engine: Participant,
    *,
    local_path: str,
    remote_url: str | None,
    delete_download: bool,
    gather: Gather,
) -> None:
    """Load what ``save_engine_checkpoint`` saved, verified before the first weight changes. Collective.

    Args:
        engine: on each rank its own, at this or another layout.
        local_path: a step directory, or a folder of them whose last complete step is taken; with remote_url the folder to download to.
        remote_url: fsspec URL of a step directory or of a folder of them; None reads local_path.
        delete_download: delete the copy that this call downloaded, and nothing else, once it is read.
        gather: over the engine's ranks.

    Raises:
        IncompleteCheckpointError: no manifest.
        DamagedCheckpointError: a file is missing or altered; names it.
        CheckpointError: a rank can't see the directory, or it holds no engine's part.
    """
    if delete_download and remote_url is None:
        raise ConfigError(
            "del_local_after_load has no effect without hdfs_path: only a downloaded copy is ever deleted."
        )
    rank = engine.topology.global_rank
    directory = _on_rank_zero(
        lambda: find_step(local_path) if remote_url is None else download(remote_url, local_path),
        rank=rank,
        gather=gather,
    )
    with ExitStack() as undo:
        if delete_download and rank == 0:
            undo.callback(lambda: remove_step(directory, read_manifest(directory), is_read=True))
        _check_seen(directory / MANIFEST_NAME, gather)
        _together(_attempt(lambda: undo.enter_context(lock_for_reading(directory))), gather)
        shard = (rank, engine.topology.world_size)
        _together(_attempt(lambda: verify(directory, shard=shard)), gather)
        if not (directory / ENGINE_PART).is_dir():
            parts = sorted(path.name for path in directory.iterdir() if path.is_dir())
            raise CheckpointError(
                f"{directory} has no part {ENGINE_PART!r} but {parts}: several participants wrote it, load it through them."
            )
        _together(_attempt(lambda: engine.read_part(str(directory / ENGINE_PART))), gather)


def _check_seen(path: Path, gather: Gather) -> None:
    """Several nodes without a shared file system would each hold a piece of a checkpoint that no one can load."""
    blind = [rank for rank, sees in enumerate(gather(path.is_file())) if not sees]
    if blind:
        raise CheckpointError(
            f"ranks {blind[:8]} do not see {path}, which rank 0 made: give a folder on a file system that all nodes share."
        )


def _write(
    engine: Participant, transaction: CheckpointTransaction, gather: Gather
) -> list[PartReport]:
    outcomes = gather(_attempt(lambda: engine.write_part(str(transaction.part(ENGINE_PART)))))
    failed = [
        f"rank {rank}: {outcome.error}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error is not None
    ]
    if failed:
        gather(
            None
        )  # every rank has stopped writing before rank 0 looks at the disk and removes the staging directory
        raise _on_rank_zero(
            lambda: transaction.failure(failed[0]), rank=engine.topology.global_rank, gather=gather
        )
    return [outcome.value for outcome in outcomes if outcome.value is not None]


def _commit(
    engine: Participant, transaction: CheckpointTransaction, reports: list[PartReport]
) -> Path:
    info = ManifestInfo(
        topology=topology_sizes(engine.topology),
        config_hash=config_hash(engine.config),
    )
    try:
        return transaction.commit({ENGINE_PART: reports}, info=info)
    except OSError as error:
        raise transaction.failure(str(error)) from error


def _on_rank_zero(action: Callable[[], T], *, rank: int, gather: Gather) -> T:
    """The result of an action that only rank 0 runs, on every rank; its error is raised on every rank too."""
    outcome: _Outcome[T] = _attempt(action) if rank == 0 else _Outcome()
    first = gather(outcome)[0]
    if first.error is not None:
        raise first.error
    assert first.value is not None
    return first.value


def _together(outcome: _Outcome[T], gather: Gather) -> None:
    """The first rank's error on every rank, or none."""
    for error in (of_rank.error for of_rank in gather(outcome)):
        if error is not None:
            raise error


def _attempt(action: Callable[[], T]) -> _Outcome[T]:
    """Errors become values, so that a rank which failed still meets the others in the next collective."""
    try:
        return _Outcome(value=action())
    except TemperError as error:
        return _Outcome(error=error)
    except _failures() as error:
        logger.warning("a checkpoint could not be written or read", exc_info=True)
        return _Outcome(error=CheckpointError(_reason(error)))


def _failures() -> tuple[type[BaseException], ...]:
    """All: libraries have errors of their own for a full disk, and torch's is not even an Exception. Imported late: it costs a second."""
    from torch.distributed.checkpoint.api import CheckpointException

    return (Exception, CheckpointException)


def _reason(error: BaseException) -> str:
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        return "; ".join(
            f"{type(cause).__name__}: {cause}" for cause, _ in list(error.failures.values())[:1]
        )
    return f"{type(error).__name__}: {error}"
