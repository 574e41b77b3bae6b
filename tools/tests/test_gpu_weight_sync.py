"""Test the weight-sync measurement for GPUs on a host without any, over gloo and shared memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# Nightly: starts processes for each of three transports, which have tests in the trainer.
@pytest.mark.nightly
def test_every_job_adds_a_row_and_an_unknown_job_is_refused(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tools.gpu.weight_sync",
        "--out",
        str(tmp_path),
        "--shape",
        "tiny",
    ]
    done = subprocess.run(
        [*command, "--jobs", "copies,gloo,shared_memory_unchecked"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row.get("transport") for row in rows[1:]] == [
        "copy_same_device",
        "checksum",
        "gloo",
        "shared_memory",
    ]
    assert [row["checksum"] for row in rows[3:]] == [True, False]
    again = subprocess.run(
        [*command, "--jobs", "copies,gloo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0
    assert "gloo: left out, because it is in" in again.stdout
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows) + 1
    wrong = subprocess.run(
        [*command, "--jobs", "nccl_1"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "nccl_1" in wrong.stderr
