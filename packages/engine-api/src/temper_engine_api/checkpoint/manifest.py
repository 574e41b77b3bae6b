"""Manifest of a step directory: it marks the step as committed and lists its files."""

import dataclasses
import errno
import hashlib
import heapq
import json
import os
import shlex
import stat
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, BinaryIO

from temper_engine_api.checkpoint.part_files import FileRecord, find_file_damage
from temper_engine_api.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    format_install,
)
from temper_engine_api.topology import Topology

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 3
"""Version of the manifest and directory layout that is written; a higher one is refused.

Version 2 added ``run_id``. Up to version 2, files have a SHA-256 under ``sha256`` instead of
``checksum``.
"""
MAX_READ_THREADS = 8
"""Maximum number of threads that compute checksums in one process."""
_OTHER_SYSTEM_FILES = (
    "model_world_size_*_rank_*.pt",
    "global_step_*",
    "latest_checkpointed_iteration.txt",
    "adapter_checkpoint",
    "mp_rank_*",
    "dist_ckpt",
    "iter_*",
)
"""Names that older systems on FSDP and Megatron leave in a checkpoint."""
_OTHER_SYSTEM_FOLDERS = ("", "model/", "*/", "*/model/")
"""Folders of these names, relative to a run, a step with a folder per role, or a role."""
_TEMPORARY_ERRORS = frozenset(
    {
        # A permission, or a limit of the process or the host.
        *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOLCK),
        # A network file system that is away.
        *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNREFUSED),
        *(errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EREMOTEIO, errno.EPIPE),
    }
)
"""Errors whose cause is not the file, which may be intact. Any other error is treated as damage."""


def list_package_versions(
    libraries: Collection[str] = ("torch", "transformers", "megatron-core"),
) -> dict[str, str]:
    """Return the versions of all Temper distributions and all installed `libraries`."""
    return {
        name: version
        for name, version in _installed()
        if name.startswith("temper-") or name in libraries
    }


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    """Return all distributions with versions; cached, because it reads hundreds of files."""
    return tuple(sorted(map(_read_name_and_version, distributions())))


def _read_name_and_version(distribution: Distribution) -> tuple[str, str]:
    # The standard library parses the full metadata as an e-mail, which takes ten times as long.
    text = (
        distribution.read_text("METADATA")
        or distribution.read_text("PKG-INFO")
        # An .egg-info that is a file and not a folder.
        or distribution.read_text("")
        or ""
    )
    lines = text.partition("\n\n")[0].splitlines()
    fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return fields.get("Name", ""), fields.get("Version", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestInfo:
    """Contents of a manifest in addition to the files."""

    topology: Mapping[str, object]
    """Sizes of the parallel axes that wrote the state, for information only."""
    config_hash: str
    """Result of `hash_config` for the configuration."""
    packages: Mapping[str, str] = field(default_factory=list_package_versions)
    """Versions by distribution, from `list_package_versions`."""
    run_id: str | None = None
    """Run that wrote the step: retention deletes only its own run's steps. None if the writer has
    no such identity, for example an engine that saves by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Step, information and files of a committed step directory.

    Example:
        >>> manifest = Manifest(
        ...     step=20,
        ...     info=ManifestInfo(topology={"dp": 2}, config_hash="ab12", packages={}),
        ...     files=(FileRecord(path="engine/a.json", num_bytes=12, checksum="blake3:64f1"),),
        ... )
        >>> manifest.num_bytes
        12
        >>> sorted(json.loads(manifest.to_json()))
        ['checksum', 'files', 'info', 'schema_version', 'step']
    """

    step: int
    """Global step, >= 0."""
    info: ManifestInfo
    files: tuple[FileRecord, ...]
    """All files except the manifest, sorted by path."""

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return sum(record.num_bytes for record in self.files)

    def to_json(self) -> str:
        """Return the JSON text, including a checksum of its other entries."""
        body = {**dataclasses.asdict(self), "schema_version": SCHEMA_VERSION}
        return json.dumps({**body, "checksum": _checksum(body)}, indent=1, sort_keys=True) + "\n"


def _checksum(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: str | Path) -> Manifest:
    """Return the manifest of a step directory.

    Raises:
        IncompleteCheckpointError: If there is none.
        DamagedCheckpointError: If it is no manifest, was altered, or its disk fails to read it.
        CheckpointError: If a newer version wrote it, or it cannot be read at the moment.
    """
    path = Path(directory) / MANIFEST_NAME
    try:
        with open_manifest(path) as file:
            content = file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        check_not_another_system(directory)
        raise IncompleteCheckpointError(
            f"{directory} has no {MANIFEST_NAME}, so it was never committed: load another step "
            "directory."
        ) from error
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    return parse_manifest(content, source=str(path))


def check_not_another_system(directory: str | Path) -> None:
    """Reject checkpoints of other systems, which would otherwise be reported as incomplete.

    Raises:
        IncompleteCheckpointError: If there are files of another system; has the command that
            converts them.
    """
    folder = Path(directory)
    patterns = (prefix + name for prefix in _OTHER_SYSTEM_FOLDERS for name in _OTHER_SYSTEM_FILES)
    file = next((path for pattern in patterns for path in folder.glob(pattern)), None)
    if file is not None:
        raise IncompleteCheckpointError(
            f"{directory} contains {file.relative_to(folder)}, which is another system's layout: "
            f"convert it with `temper-migrate checkpoint {shlex.quote(str(directory))} --to temper "
            f"--out NEW`, and load NEW. To install temper-migrate: "
            f"{format_install('temper-legacy-shim[checkpoint]')}."
        )


def open_manifest(path: Path) -> BinaryIO:
    """Open a manifest for reading, without waiting for a writer if it was replaced by a FIFO.

    Raises:
        IsADirectoryError: If it is a directory.
        DamagedCheckpointError: If it is neither a file nor a directory.
        OSError: If it cannot be opened.
    """
    # O_NONBLOCK has no effect on files; without it, opening a FIFO blocks until there is a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise DamagedCheckpointError(f"{path} is not a file: load another step directory.")
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def parse_manifest(content: bytes, *, source: str) -> Manifest:
    """Return the manifest from its bytes; ``source`` names it in errors.

    Raises:
        CheckpointError: Of the kinds that ``read_manifest`` raises.
    """
    try:
        body = json.loads(content)
        # Check the checksum before the version, because a flipped bit in the version is damage and
        # not a newer release.
        is_intact = body.pop("checksum") == _checksum(body)
        if is_intact and body["schema_version"] > SCHEMA_VERSION:
            raise CheckpointError(
                f"{source} has schema version {body['schema_version']}, but this temper-engine-api "
                f"reads up to {SCHEMA_VERSION}: install a newer one."
            )
        manifest = Manifest(
            step=body["step"],
            info=ManifestInfo(**body["info"]),
            files=tuple(_parse_record(record) for record in body["files"]),
        )
        paths = [Path(record.path) for record in manifest.files]
    # RecursionError: from content that is nested too deeply for the parser.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{source} is damaged ({error}): load another step directory."
        ) from error
    if any(path.is_absolute() or ".." in path.parts for path in paths):
        raise DamagedCheckpointError(
            f"{source} names a file outside its directory: load another step directory."
        )
    if not is_intact:
        raise DamagedCheckpointError(
            f"{source} does not match its own checksum: load another step directory."
        )
    return manifest


def _parse_record(record: Mapping[str, Any]) -> FileRecord:
    """Return an entry of ``files``, also of schema versions 1 and 2."""
    entry = dict(record)
    if "sha256" in entry:
        entry["checksum"] = f"sha256:{entry.pop('sha256')}"
    if not isinstance(entry["checksum"], str):
        raise TypeError(f"the checksum {entry['checksum']!r} is not text")
    return FileRecord(**entry)


def verify(
    directory: str | Path,
    *,
    shard: tuple[int, int] = (0, 1),
    with_content: bool = True,
    num_threads: int | None = None,
) -> Manifest:
    """Check a step directory against its manifest: every file has its size and its checksum.

    Args:
        directory: Step directory.
        shard: (rank, num_ranks): Read only this shard of the files, so that all ranks together
            read every file once. Shards are balanced by size. All sizes are always checked.
        with_content: Read the files and compare checksums; False checks only sizes.
        num_threads: Number of files that are read at once; None is one per CPU, up to 8.

    Raises:
        IncompleteCheckpointError: If there is no manifest.
        DamagedCheckpointError: If a file is missing, short, altered, or its disk fails to read it;
            names the first one.
        CheckpointError: If a file cannot be read, for example for lack of permission.
    """
    manifest = read_manifest(directory)
    folder = Path(directory)
    # Sizes first: they find most damage before any file is read.
    for record in manifest.files:
        check_file(folder, record, with_content=False)
    if with_content:
        records = partition_by_size(manifest.files, num_shards=shard[1])[shard[0]]
        # Hashing releases the interpreter lock, so threads hash in parallel.
        workers = min(os.cpu_count() or 1, MAX_READ_THREADS) if num_threads is None else num_threads
        with ThreadPoolExecutor(max_workers=workers) as pool:
            checks = [pool.submit(check_file, folder, r, with_content=True) for r in records]
            try:
                for check in checks:
                    check.result()
            except CheckpointError:
                # One damaged file is enough for the error, so the rest need not be read.
                pool.shutdown(cancel_futures=True)
                raise
    return manifest


def partition_by_size(files: Sequence[FileRecord], *, num_shards: int) -> list[list[FileRecord]]:
    """Partition files by size across ranks; the result is the same on every rank."""
    shards: list[list[FileRecord]] = [[] for _ in range(num_shards)]
    loads = [(0, i) for i in range(num_shards)]  # a heap: the least loaded rank takes the next file
    # The path breaks ties, so that all ranks agree without communication.
    for record in sorted(files, key=lambda r: (-r.num_bytes, r.path)):
        num_bytes, rank = loads[0]
        shards[rank].append(record)
        heapq.heapreplace(loads, (num_bytes + record.num_bytes, rank))
    return shards


def check_file(directory: Path, record: FileRecord, *, with_content: bool) -> None:
    """Check a file of a step directory against the manifest's entry.

    Raises:
        DamagedCheckpointError: If it is missing, short or altered, or its disk fails to read it.
        CheckpointError: If it cannot be read, for example for lack of permission.
    """
    try:
        fault = find_file_damage(directory, record, with_content=with_content)
    except OSError as error:
        raise make_unreadable_error(directory / record.path, error) from error
    if fault is not None:
        path = directory / record.path
        raise DamagedCheckpointError(f"{path} {fault}: load another step directory.")


def make_unreadable_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that is there but cannot be read.

    It is a `DamagedCheckpointError` if the file is damaged. A missing permission, for example, says
    nothing about the content.
    """
    if error.errno not in _TEMPORARY_ERRORS:
        return DamagedCheckpointError(
            f"{path} cannot be read ({error.strerror}): load another step directory."
        )
    return CheckpointError(
        f"{path} cannot be read ({error.strerror}). The checkpoint is not damaged and was not "
        "changed: fix the permission or the file system, then start again."
    )


def get_axis_sizes(topology: Topology) -> dict[str, int]:
    """Return the sizes of the axes by name, for the manifest."""
    axes = {
        "dp": topology.dp,
        "tp": topology.tp,
        "pp": topology.pp,
        "cp": topology.cp,
        "ep": topology.ep,
        "sp": topology.sp,
    }
    return {"world_size": topology.world_size, **{name: axis.size for name, axis in axes.items()}}


def hash_config(config: object) -> str:
    """Return the SHA-256 of a configuration. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(_plain(config), sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(
        f"a configuration consists of mappings, sequences and scalars, but contains a "
        f"{type(value).__name__}: use one of those types."
    )
