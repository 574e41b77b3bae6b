"""The manifest of a step directory: its presence is the commit, its records say what a whole checkpoint is."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from temper_engine_api.checkpoint.parts import FileRecord, fault_of
from temper_engine_api.errors import CheckpointError, DamagedCheckpointError, IncompleteCheckpointError
from temper_engine_api.topology import Topology

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1
"""Of the manifest and of the layout beside it; a higher one is refused."""


def package_versions(also: Iterable[str] = ("torch", "transformers", "megatron-core")) -> dict[str, str]:
    """Versions of every installed distribution of Temper, and of these others where they are installed."""
    wanted = set(also)
    return {name: version for name, version in _installed() if name.startswith("temper-") or name in wanted}


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    """Every distribution with its version, in order; read once, for that takes half a second where many are installed."""
    return tuple(sorted((str(d.metadata["Name"]), d.version) for d in distributions()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestInfo:
    """What a manifest says beside its files."""

    topology: Mapping[str, object]
    """Sizes that the state was written at, by axis or by role and axis; for people, loading does not depend on it."""
    config_hash: str
    """SHA-256 of the configuration; see ``config_hash``."""
    packages: Mapping[str, str] = field(default_factory=package_versions)
    """Versions by distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a committed step directory holds."""

    step: int
    """Global step, >= 0."""
    info: ManifestInfo
    """See ManifestInfo."""
    files: tuple[FileRecord, ...]
    """Every file but the manifest, ordered by path."""
    schema_version: int = SCHEMA_VERSION
    """See SCHEMA_VERSION."""

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(record.num_bytes for record in self.files)

    def to_json(self) -> str:
        """As written: one JSON object with a checksum of its other entries."""
        body = dataclasses.asdict(self)
        return json.dumps({**body, "checksum": _checksum(body)}, indent=1, sort_keys=True) + "\n"


def _checksum(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a step directory.

    Raises:
        IncompleteCheckpointError: there is none.
        DamagedCheckpointError: it can't be read or was altered.
        CheckpointError: a newer version wrote it.
    """
    path = Path(directory) / MANIFEST_NAME
    if not path.is_file():
        raise IncompleteCheckpointError(f"{directory} has no {MANIFEST_NAME}, so it was never committed: load another step directory.")
    return parse_manifest(path.read_bytes(), source=str(path))


def parse_manifest(content: bytes, *, source: str) -> Manifest:
    """The manifest from its bytes; ``source`` names it in errors, which are those of ``read_manifest``."""
    try:
        body = json.loads(content)
        checksum = body.pop("checksum")
        if body["schema_version"] > SCHEMA_VERSION:
            raise CheckpointError(
                f"{source} has schema version {body['schema_version']}, but this temper-engine-api reads up to "
                f"{SCHEMA_VERSION}: install a newer one."
            )
        manifest = Manifest(
            step=body["step"],
            info=ManifestInfo(**body["info"]),
            files=tuple(FileRecord(**record) for record in body["files"]),
            schema_version=body["schema_version"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{source} is damaged ({error}): load another step directory.") from error
    if any(Path(record.path).is_absolute() or ".." in Path(record.path).parts for record in manifest.files):
        raise DamagedCheckpointError(f"{source} names a file outside its directory: load another step directory.")
    if checksum != _checksum(body):
        raise DamagedCheckpointError(f"{source} does not match its own checksum: load another step directory.")
    return manifest


def verify(directory: str | Path, *, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Check a step directory against its manifest: every file is there with its size, and with its checksum.

    Args:
        directory: a step directory.
        share: (rank, ranks): checksums of every ranks-th file only, so that many ranks share the reading; sizes are always checked.

    Raises:
        IncompleteCheckpointError: no manifest.
        DamagedCheckpointError: naming the first file that is missing, short or altered.
    """
    manifest = read_manifest(directory)
    rank, num_ranks = share
    for i, record in enumerate(manifest.files):
        fault = fault_of(Path(directory), record, with_content=i % num_ranks == rank)
        if fault is not None:
            raise DamagedCheckpointError(f"{Path(directory) / record.path} {fault}: load another step directory.")
    return manifest


def topology_sizes(topology: Topology) -> dict[str, int]:
    """Sizes of the axes by name, as a manifest holds them."""
    axes = {"dp": topology.dp, "tp": topology.tp, "pp": topology.pp, "cp": topology.cp, "ep": topology.ep, "sp": topology.sp}
    return {"world_size": topology.world_size, **{name: axis.size for name, axis in axes.items()}}


def config_hash(config: object) -> str:
    """SHA-256 of a frozen configuration: dataclasses, mappings, sequences and scalars, independent of the order of keys."""
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
    raise TypeError(f"a configuration holds mappings, sequences and scalars, not a {type(value).__name__}.")
