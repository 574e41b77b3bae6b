"""Memory does not grow with the checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest

_WRITE = """
import sys, torch
names = [f"model.layers.{i}.weight" for i in range(int(sys.argv[2]))]
tensors = {name: torch.empty(int(sys.argv[3]), 1 << 14) for name in names}  # never touched
with torch.serialization.skip_data():
    torch.save(tensors, sys.argv[1])
"""
_READ = """
import sys
from pathlib import Path
from temper_legacy_shim.checkpoints import rank_files
from temper_legacy_shim.checkpoints.files.lazy import blocks

def peak_mb():
    lines = open("/proc/self/status")
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

path = Path(sys.argv[1])
weights = rank_files.read_weights({0: path}, where=path.parent)
before, total = peak_mb(), 0
for tensor in weights.values():
    total += sum(block.nbytes for block in blocks(tensor))
print(total, before, peak_mb())
"""


def _grown(folder: Path, *, num_tensors: int, rows: int) -> tuple[int, float, float]:
    """Measure bytes read and peak memory before and after, in a separate process."""
    path = folder / "model_world_size_1_rank_0.pt"
    subprocess.run(
        [sys.executable, "-c", _WRITE, str(path), str(num_tensors), str(rows)], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(path)], check=True, capture_output=True, text=True
    )
    total, before, after = done.stdout.split()
    return int(total), float(before), float(after)


# Nightly: a smaller conversion has the same bound in the next test.
@pytest.mark.nightly
def test_two_gigabytes_are_read_in_a_few_blocks(tmp_path: Path) -> None:
    total, before, after = _grown(tmp_path, num_tensors=8, rows=1 << 12)
    assert total == 8 * 2**28
    assert after - before < 16
    assert after < 120


# Nightly: reads for half a minute. A smaller conversion has the same bound below.
@pytest.mark.nightly
def test_sixty_four_gigabytes_are_read_in_as_few(tmp_path: Path) -> None:
    total, before, after = _grown(tmp_path, num_tensors=64, rows=1 << 14)
    assert total == 64 * 2**30
    assert after - before < 16
    assert after < 120


_COMMAND = """
import sys
from temper_legacy_shim.cli import app
app(standalone_mode=False)
lines = open("/proc/self/status")
print(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024)
"""


def test_a_full_conversion_holds_a_few_blocks(tmp_path: Path) -> None:
    # 256 MB through the command, imports included; the check of names is a process of its own,
    # which loads torch.
    role = tmp_path / "actor"
    (role / "huggingface").mkdir(parents=True)
    (role / "huggingface/config.json").write_text('{"model_type": "llama"}')
    subprocess.run(
        [
            sys.executable,
            "-c",
            _WRITE,
            str(role / "model_world_size_1_rank_0.pt"),
            "4",
            str(1 << 10),
        ],
        check=True,
    )
    command = [
        "checkpoint",
        str(role),
        "--out",
        str(tmp_path / "out"),
        "--dtype",
        "bfloat16",
        "--no-verify-names",
    ]
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *command], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "out/model.safetensors").stat().st_size > 2**27
    assert float(done.stdout.split()[-1]) < 120


_GROUP = """
import sys
from pathlib import Path
import numpy as np
from temper_legacy_shim.checkpoints.temper.dcp import write_group
from temper_legacy_shim.checkpoints.files.dtypes import FLOAT32

class Ones:
    shape, dtype = (1 << 12, 1 << 12), FLOAT32  # 64 MB
    def read(self, start, stop):
        return np.ones((stop - start, self.shape[1]), np.float32)

def peak_mb():
    lines = open("/proc/self/status")
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

write_group(Path(sys.argv[1]) / "first", {"a": Ones()}, progress=lambda _: None)
before = peak_mb()
group = {str(i): Ones() for i in range(7)}
write_group(Path(sys.argv[1]) / "second", group, progress=lambda _: None)
print(peak_mb() - before)
"""


# Nightly: test_a_full_conversion_holds_a_few_blocks measures the same writer.
@pytest.mark.nightly
def test_group_of_a_step_directory_is_written_in_a_few_blocks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _GROUP, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert float(done.stdout) < 100


_LAYERS = """
import sys
from pathlib import Path
import numpy as np
from temper_legacy_shim.checkpoints.temper.dcp import write_group
from temper_legacy_shim.checkpoints.files.dtypes import FLOAT32

class Ones:
    dtype = FLOAT32
    def __init__(self, rows):
        self.shape = (rows, 1 << 10)  # 4 KiB a row
    def read(self, start, stop):
        return np.ones((stop - start, self.shape[1]), np.float32)

def peak_mb():
    lines = open("/proc/self/status")
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

rows = (1 << 12, 1 << 8, 1 << 11, 1 << 10, 3 << 10, 1)
write_group(Path(sys.argv[1]) / "first", {"a": Ones(1)}, progress=lambda _: None)
before = peak_mb()
for number in range(int(sys.argv[2])):
    group = {f"{layer}.{i}": Ones(n) for layer in range(6) for i, n in enumerate(rows)}
    write_group(Path(sys.argv[1]) / str(number), group, progress=lambda _: None)
print(peak_mb() - before)
"""


def test_tensors_of_many_sizes_leave_no_holes_in_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LAYERS, str(tmp_path), "2"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert float(done.stdout) < 48
