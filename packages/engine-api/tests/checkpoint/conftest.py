"""Fixtures that write small checkpoints."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from temper_engine_api.checkpoint import ManifestInfo, begin_checkpoint, report_part

INFO = ManifestInfo(
    topology={"dp": 1}, config_hash="c0ffee", packages={"temper-engine-api": "0.1.0"}
)


@pytest.fixture(scope="session")
def info() -> ManifestInfo:
    return INFO


@pytest.fixture
def save_step(tmp_path: Path) -> Callable[..., Path]:
    """Commit a step of two parts, one of them with a file in a folder."""

    def save(
        step: int, *, content: str = "weights", root: Path = tmp_path, run_id: str | None = None
    ) -> Path:
        with begin_checkpoint(root, step, run_id=run_id) as transaction:
            engine, trainer = transaction.open_part("engine"), transaction.open_part("trainer")
            (engine / "shards").mkdir()
            (engine / "shards" / "0.bin").write_text(f"{content} of step {step}")
            (trainer / "state.json").write_text("{}")
            reports = {
                "engine": [report_part(engine, ["shards/0.bin"])],
                "trainer": [report_part(trainer, ["state.json"])],
            }
            return transaction.commit(reports, info=replace(INFO, run_id=run_id))

    return save


@pytest.fixture
def downgrade() -> Callable[..., None]:
    """Rewrite the manifest of a step as an earlier schema version wrote it."""

    def rewrite(step: Path, schema_version: int) -> None:
        body = json.loads((step / "manifest.json").read_text())
        del body["checksum"]
        body["schema_version"] = schema_version
        if schema_version == 1:
            del body["info"]["run_id"]
        for record in body["files"]:
            del record["checksum"]
            record["sha256"] = hashlib.sha256((step / record["path"]).read_bytes()).hexdigest()
        checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        (step / "manifest.json").write_text(json.dumps({**body, "checksum": checksum}))

    return rewrite


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a machine where this user may mount a tmpfs runs this")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
