"""Save and load the checkpoint of a single engine, also in the background.

All ranks call these functions together. Rank 0 creates and commits the step directory. Ranks gather
paths and errors to raise the same error everywhere.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

from temper_engine_api.checkpoint.manifest import (
    MANIFEST_NAME,
    ManifestInfo,
    get_axis_sizes,
    hash_config,
    read_manifest,
    verify,
)
from temper_engine_api.checkpoint.part_files import PartReport, report_part, write_json
from temper_engine_api.checkpoint.remote_copy import download, upload
from temper_engine_api.checkpoint.step_directories import (
    MARKER_NAME,
    find_step,
    lock_for_reading,
    prune,
    remove_step,
)
from temper_engine_api.checkpoint.transaction import (
    CheckpointTransaction,
    begin_checkpoint,
    open_part,
)
from temper_engine_api.distributed.gatherable import gatherable
from temper_engine_api.errors import (
    CheckpointError,
    ConfigError,
    EngineStateError,
    RankFailedError,
    TemperError,
)
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology

logger = logging.getLogger(__name__)

ENGINE_PART = "engine"
"""Folder of the engine's files in a step directory."""
PROGRESS_FILE = "progress.json"
"""File with the engine's counters in that folder."""

T = TypeVar("T")


class Gather(Protocol):
    """Gather small values from all ranks to all ranks, in rank order."""

    def __call__(self, item: T, /) -> list[T]:
        """Gather an object. Collective."""


class Participant(Protocol):
    """Attributes of an engine that saving and loading use."""

    @property
    def config(self) -> EngineConfig:
        """Configuration, whose hash goes into the manifest."""

    @property
    def topology(self) -> Topology:
        """Sizes and ranks of the parallel axes."""

    def write_part(self, directory: str) -> PartReport:
        """Write this rank's files for the engine's part of the checkpoint. Collective."""

    def read_part(self, directory: str) -> None:
        """Read the files of `write_part`. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedEngine:
    """Copy of an engine's state for `save_engine_checkpoint`, made at the time of the save."""

    config: EngineConfig
    topology: Topology
    write: Callable[[str], list[str]]
    """Writes the state to a directory and returns relative paths of this rank's files. Collective;
    a background save calls it on every rank's saving thread."""
    progress: Mapping[str, object]
    """Counters of the engine at that time. The saving thread uses this copy, because the engine
    continues to train."""

    def write_part(self, directory: str) -> PartReport:
        """Write this rank's files for the engine's part of the checkpoint. Collective."""
        files = self.write(directory)
        if self.topology.global_rank == 0:
            files = [*files, write_json(directory, PROGRESS_FILE, self.progress)]
        return report_part(directory, files)

    def read_part(self, directory: str) -> None:
        """Raise EngineStateError: a copy can only be written."""
        raise EngineStateError(
            f"{directory} can't be read into the copy of an engine that is being saved: call "
            "load_checkpoint() of the engine."
        )


class BackgroundSave(Generic[T]):
    """One save in a thread; its result or error is kept until `finish`.

    The thread is not a daemon, so the process does not exit before the save has ended.
    """

    def __init__(self, action: Callable[[], T], *, path: Path) -> None:
        """Start the thread.

        Args:
            action: Function that saves.
            path: Checkpoint path, used in the log and for the thread name.
        """
        # Not Thread.join: if Ctrl-C interrupts it, Python 3.11 takes the thread for stopped, and
        # the process ends without it.
        self._future = Future[T]()

        def run() -> None:
            try:
                self._future.set_result(action())
            except BaseException as error:  # noqa: BLE001 (raised again by finish)
                logger.error("saving %s in the background failed: %s", path, error)
                self._future.set_exception(error)

        threading.Thread(target=run, name=f"saving {path.name}").start()

    @property
    def is_done(self) -> bool:
        """True if the save has ended, with or without an error."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the save has ended; keep its result or error for `finish`."""
        wait([self._future])

    def finish(self) -> T:
        """Wait for the save and return its result, or raise its error."""
        return self._future.result()


@gatherable
@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome(Generic[T]):
    """Result or error of an action on one rank."""

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
    """Save a checkpoint of one engine and commit it. Collective.

    Args:
        engine: This rank's engine, or a staged copy of it.
        local_path: Folder of step directories, on a file system that all ranks share.
        remote_url: fsspec URL of a folder that gets a copy after the commit; None makes no copy.
        step: Global step.
        max_to_keep: Number of complete steps to keep in `local_path`; None keeps all.
        gather: Gathers objects over the engine's ranks.

    Returns:
        The committed step directory.

    Raises:
        CheckpointError: If the step exists, a rank can't see `local_path`, or writing fails.
            Earlier steps are unchanged.
    """
    if max_to_keep is not None and max_to_keep < 1:
        raise ConfigError(
            f"max_ckpt_to_keep is {max_to_keep}, but must be at least 1, or null to keep all."
        )
    rank = engine.topology.global_rank
    with ExitStack() as undo:
        # Only rank 0 has the transaction, to remove or rename the directory. Enter it before the
        # first gather, which raises if a rank is lost.
        begun: _Outcome[CheckpointTransaction] = (
            _attempt(lambda: begin_checkpoint(local_path, step)) if rank == 0 else _Outcome()
        )
        transaction = None if begun.value is None else undo.enter_context(begun.value)
        _raise_on_every_rank(begun, gather)
        staging = gather(None if transaction is None else transaction.staging)[0]
        assert staging is not None
        # Check this before writing, to not fail at the end of a large save.
        _check_seen(staging / MARKER_NAME, gather)
        reports = _write(engine, staging, transaction, gather)
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
    """Verify a checkpoint of `save_engine_checkpoint`, then load it. Collective.

    Args:
        engine: This rank's engine; its layout may differ from the one that saved.
        local_path: Step directory, or folder whose latest complete step is loaded. With
            `remote_url`, the folder to download to.
        remote_url: fsspec URL of a step directory or a folder of them; None reads `local_path`.
        delete_download: Delete the downloaded copy after loading.
        gather: Gathers objects over the engine's ranks.

    Raises:
        IncompleteCheckpointError: If there is no manifest.
        DamagedCheckpointError: If a file is missing or altered.
        CheckpointError: If a rank can't see the directory, or it has no engine folder.
    """
    if delete_download and remote_url is None:
        raise ConfigError(
            "del_local_after_load has no effect without hdfs_path, because only a downloaded copy "
            "is ever deleted: remove it, or give hdfs_path."
        )
    rank = engine.topology.global_rank
    directory = _on_rank_zero(
        lambda: find_step(local_path) if remote_url is None else download(remote_url, local_path),
        rank=rank,
        gather=gather,
    )
    with ExitStack() as undo:
        if delete_download and rank == 0:
            undo.callback(_delete_download, directory)
        _check_seen(directory / MANIFEST_NAME, gather)
        _raise_on_every_rank(
            _attempt(lambda: undo.enter_context(lock_for_reading(directory))), gather
        )
        # Divide the files over ranks, to read each file once.
        shard = (rank, engine.topology.world_size)
        _raise_on_every_rank(_attempt(lambda: verify(directory, shard=shard)), gather)
        if not (directory / ENGINE_PART).is_dir():
            parts = sorted(path.name for path in directory.iterdir() if path.is_dir())
            raise CheckpointError(
                f"{directory} has no folder {ENGINE_PART!r}, but {parts}: it was saved by a run "
                "with several engines. Resume that run, or load a step that one engine saved."
            )
        _raise_on_every_rank(
            _attempt(lambda: engine.read_part(str(directory / ENGINE_PART))), gather
        )


def _delete_download(directory: Path) -> None:
    """Delete the downloaded copy; log a warning if that fails.

    Rank 0 calls this after the last gather, where an exception would break the process group even
    though the load succeeded.
    """
    try:
        remove_step(directory, read_manifest(directory), is_read=True)
    except (OSError, CheckpointError):
        logger.warning("could not delete the downloaded copy %s", directory, exc_info=True)


def _check_seen(path: Path, gather: Gather) -> None:
    """Check that all ranks see a file of rank 0.

    Without a shared file system, each node would write a fragment of the checkpoint.
    """
    without_file = [rank for rank, sees in enumerate(gather(path.is_file())) if not sees]
    if without_file:
        raise CheckpointError(
            f"ranks {without_file[:8]} do not see {path}, which rank 0 created: give a folder "
            "on a file system that all nodes share."
        )


def _write(
    engine: Participant, staging: Path, transaction: CheckpointTransaction | None, gather: Gather
) -> list[PartReport]:
    def run(action: Callable[[], T]) -> list[T]:
        outcomes = gather(_attempt(action))
        failed = [
            f"rank {rank}: {outcome.error}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error is not None
        ]
        if failed:
            # Wait until all ranks have stopped writing before rank 0 removes the directory.
            gather(None)
            raise _on_rank_zero(
                lambda: _describe_failure(transaction, failed[0]),
                rank=engine.topology.global_rank,
                gather=gather,
            )
        return [outcome.value for outcome in outcomes if outcome.value is not None]

    # Open the directory on all ranks first: a rank that fails here would not reach the collectives
    # of write_part.
    directory = run(lambda: open_part(staging, ENGINE_PART))[engine.topology.global_rank]
    return run(lambda: engine.write_part(str(directory)))


def _describe_failure(transaction: CheckpointTransaction | None, reason: str) -> CheckpointError:
    assert transaction is not None, "only rank 0 has the transaction"
    return transaction.make_error(reason)


def _commit(
    engine: Participant, transaction: CheckpointTransaction | None, reports: list[PartReport]
) -> Path:
    assert transaction is not None, "only rank 0 has the transaction"
    info = ManifestInfo(
        topology=get_axis_sizes(engine.topology),
        config_hash=hash_config(engine.config),
    )
    try:
        return transaction.commit({ENGINE_PART: reports}, info=info)
    except OSError as error:
        raise transaction.make_error(str(error)) from error


def _on_rank_zero(action: Callable[[], T], *, rank: int, gather: Gather) -> T:
    """Run an action on rank 0 and return its result, or raise its error, on every rank."""
    outcome: _Outcome[T] = _attempt(action) if rank == 0 else _Outcome()
    first = gather(outcome)[0]
    if first.error is not None:
        raise first.error
    assert first.value is not None
    return first.value


def run_on_every_rank(action: Callable[[], T], *, gather: Gather) -> T:
    """Run an action on every rank, and return its result if it succeeded on all. Collective.

    Use it before collectives that a failed rank would not reach.

    Args:
        action: Does not communicate.
        gather: The engine's `gather_objects`.

    Raises:
        TemperError: The first error of any rank, on every rank. Exceptions of other types become a
            `CheckpointError`.
    """
    outcome = _attempt(action)
    _raise_on_every_rank(outcome, gather)
    return cast(T, outcome.value)


def _raise_on_every_rank(outcome: _Outcome[T], gather: Gather) -> None:
    """Raise the first error of any rank on every rank."""
    # Gather the errors and not the values, because some values cannot be encoded.
    for error in gather(outcome.error):
        if error is not None:
            raise error


def _attempt(action: Callable[[], T]) -> _Outcome[T]:
    """Return errors as values, so that a failed rank still takes part in the next collective."""
    try:
        return _Outcome(value=action())
    except RankFailedError:
        raise  # the connections are closed, so nothing can be gathered
    except TemperError as error:
        return _Outcome(error=error)
    except _list_failure_types() as error:
        logger.warning("a checkpoint could not be written or read", exc_info=True)
        return _Outcome(error=CheckpointError(_describe_error(error)))


def _list_failure_types() -> tuple[type[BaseException], ...]:
    """Return the exception types that a failed save or load may raise.

    Includes all exceptions, because libraries raise their own errors when a disk is full, and
    torch's CheckpointException, which is not a subclass of Exception. The import is local, because
    it takes a second.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    return (Exception, CheckpointException)


def _describe_error(error: BaseException) -> str:
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        return "; ".join(
            f"{type(cause).__name__}: {cause}" for cause, _ in list(error.failures.values())[:1]
        )
    return f"{type(error).__name__}: {error}"
