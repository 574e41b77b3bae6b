"""Time the conversion of a sharded verl checkpoint to Hugging Face safetensors.

    python bench/bench_convert.py [--layers 24] [--repeats 3] [--verl-python PATH] [--json FILE]

Compares temper-migrate with verl's model merger. Both convert float32 shards of four ranks, as
torch pickles them, to bfloat16 safetensors with a config, and the outputs are compared tensor by
tensor. Reports wall-clock and CPU seconds of the best repeat and the peak of resident memory. Each
contender is a separate process, measured from start to exit including imports. The merger runs
with the Python of --verl-python, an environment with verl 0.9.1; without it, it is skipped.

The work differs in two ways. temper-migrate also reads its output back, compares it, and waits
until it is on disk; the merger also builds the transformers model. Pending writes are flushed
before each run. Copying the checkpoint with cp is timed for reference.

The contender `--to temper` writes a step directory of float32 weights and two moments, six times
the bytes of the others. verl has no counterpart of it, so the table has its bytes too.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors import safe_open

WORLD_SIZE = 4
FIELDS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Resources that one contender's process used."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    written_mb: float = 0.0
    """Bytes of the output, in units of 10^6."""


def make_checkpoint(folder: Path, *, num_layers: int) -> int:
    """Write a role directory with random weights, and return the bytes of its weights."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(num_hidden_layers=num_layers, tie_word_embeddings=False, **FIELDS)
    config.architectures = ["Qwen2ForCausalLM"]
    with torch.device("meta"):
        shapes = {
            name: tensor.shape for name, tensor in Qwen2ForCausalLM(config).state_dict().items()
        }
    config.save_pretrained(folder / "huggingface")
    (folder / "fsdp_config.json").write_text(
        json.dumps({"FSDP_version": 2, "world_size": WORLD_SIZE})
    )
    for rank in range(WORLD_SIZE):
        # A fake process group lets one process write the shards of all ranks.
        dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
        mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
        state = {}
        for name, shape in shapes.items():
            # All row counts are multiples of the number of ranks, so every rank has equal shards.
            local = torch.randn((shape[0] // WORLD_SIZE, *shape[1:]))
            state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        torch.save(state, folder / f"model_world_size_{WORLD_SIZE}_rank_{rank}.pt")
        dist.destroy_process_group()
    return sum(shape.numel() for shape in shapes.values()) * 4


WRAPPER = """
import atexit, runpy, sys
peak_file = sys.argv.pop(1)

def write_peak():
    with open("/proc/self/status") as status, open(peak_file, "w") as out:
        out.write(next(line for line in status if line.startswith("VmHWM")).split()[1])

atexit.register(write_peak)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Runs a module as a program and writes its peak memory.

The peak that wait4 reports would include the parent's memory at the fork.
"""


def run(command: list[str], *, environment: dict[str, str], folder: Path) -> Cost:
    """Run `python module arguments...` and return its wall-clock time, CPU time and peak memory."""
    peak = folder / "peak"
    python, *rest = command
    started = time.perf_counter()
    process = subprocess.Popen(
        [python, "-c", WRAPPER, str(peak), *rest],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    error_output = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(command)} failed: {error_output[-2000:]}")
    return Cost(
        wall_s=wall_s, cpu_s=usage.ru_utime + usage.ru_stime, peak_mb=int(peak.read_text()) / 1024
    )


def measure_output(folder: Path) -> float:
    """Return the megabytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def time_copy(source: Path, target: Path) -> float:
    """Return the seconds of cp, which does not wait until the copy is on disk."""
    os.sync()
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    took = time.perf_counter() - started
    shutil.rmtree(target)
    return took


def select_best(costs: list[Cost]) -> Cost:
    """Return the minimum of each field."""
    return Cost(
        # The minimum, because other load on the host only adds to a run's cost.
        wall_s=min(c.wall_s for c in costs),
        cpu_s=min(c.cpu_s for c in costs),
        peak_mb=min(c.peak_mb for c in costs),
        written_mb=min(c.written_mb for c in costs),
    )


def find_differing_tensors(one: Path, other: Path) -> list[str]:
    """Return names of tensors that are missing or not bitwise equal in two model directories."""
    files, other_files = _map_tensors_to_files(one), _map_tensors_to_files(other)
    differing = sorted(files.keys() ^ other_files.keys())
    for name in sorted(files.keys() & other_files.keys()):
        with (
            safe_open(files[name], "pt") as tensors,
            safe_open(other_files[name], "pt") as other_tensors,
        ):
            if not torch.equal(tensors.get_tensor(name), other_tensors.get_tensor(name)):
                differing.append(name)
    return differing


def _map_tensors_to_files(folder: Path) -> dict[str, str]:
    files = {}
    # The two tools may split the tensors differently over files.
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), str(path))
    return files


def build_commands(root: Path, verl_python: str | None) -> dict[str, list[str]]:
    """Return the command of each contender; each writes to the folder of its name below root."""
    actor = str(root / "actor")
    migrate = [sys.executable, "temper_legacy_shim", "checkpoint", actor]
    migrate += ["--dtype", "bfloat16", "--no-verify-names"]
    step = [sys.executable, "temper_legacy_shim", "checkpoint", actor, "--to", "temper"]
    commands = {
        "temper-migrate": [*migrate, "--out", str(root / "temper-migrate")],
        "--to temper": [*step, "--no-verify-names", "--out", str(root / "--to temper")],
    }
    if verl_python:
        merge = [verl_python, "verl.model_merger", "merge", "--backend", "fsdp"]
        merge += ["--local_dir", actor, "--target_dir", str(root / "verl merger")]
        commands["verl merger"] = merge
    return commands


def measure(commands: dict[str, list[str]], *, root: Path, repeats: int) -> dict[str, Cost]:
    """Run the contenders in turns, and return the best cost of each."""
    # verl's environment must not import the packages of this checkout.
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            environment = clean if name == "verl merger" else dict(os.environ)
            shutil.rmtree(root / name, ignore_errors=True)
            os.sync()
            cost = run(command, environment=environment, folder=root)
            costs[name].append(replace(cost, written_mb=measure_output(root / name)))
    return {name: select_best(repeated) for name, repeated in costs.items()}


def print_table(
    results: dict[str, Cost], *, num_bytes: int, copy_s: float, repeats: int, differing: list[str]
) -> None:
    """Print the costs and, if verl's merger ran, the ratios and the number of unequal tensors."""
    print(
        f"{num_bytes / 1e9:.2f} GB of float32 in {WORLD_SIZE} ranks, to bfloat16; "
        f"best of {repeats}; {platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':16} {'wall s':>8} {'CPU s':>8} {'peak MB':>8} {'out MB':>8}")
    for name, cost in results.items():
        print(
            f"{name:16} {cost.wall_s:8.1f} {cost.cpu_s:8.1f} {cost.peak_mb:8.0f} "
            f"{cost.written_mb:8.0f}"
        )
    print(f"{'cp -r':16} {copy_s:8.1f}")
    if "verl merger" not in results:
        print("verl merger: skipped; name an environment with verl 0.9.1 with --verl-python")
        return
    temper, verl = results["temper-migrate"], results["verl merger"]
    wall, cpu, peak = (
        getattr(verl, field) / getattr(temper, field) for field in ("wall_s", "cpu_s", "peak_mb")
    )
    print(f"verl / temper    {wall:8.1f} {cpu:8.1f} {peak:8.1f}")
    step = results["--to temper"]
    per_byte = (step.written_mb / step.cpu_s) / (verl.written_mb / verl.cpu_s)
    print(
        f"verl / to temper {verl.wall_s / step.wall_s:8.1f} {verl.cpu_s / step.cpu_s:8.1f} "
        f"{verl.peak_mb / step.peak_mb:8.1f}; bytes written per CPU second: {per_byte:.1f} times"
    )
    print(f"tensors that differ: {len(differing)}")


def main() -> None:
    """Run the contenders and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verl-python", help="Python of an environment with verl 0.9.1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-convert-") as folder:
        root = Path(folder)
        num_bytes = make_checkpoint(root / "actor", num_layers=options.layers)
        commands = build_commands(root, options.verl_python)
        results = measure(commands, root=root, repeats=options.repeats)
        copy_s = min(time_copy(root / "actor", root / "copy") for _ in range(options.repeats))
        differing = (
            find_differing_tensors(root / "temper-migrate", root / "verl merger")
            if options.verl_python
            else []
        )
    print_table(
        results, num_bytes=num_bytes, copy_s=copy_s, repeats=options.repeats, differing=differing
    )
    if options.json:
        report = {
            "when": datetime.now(UTC).isoformat(),
            "bytes": num_bytes,
            "results": {name: asdict(cost) for name, cost in results.items()},
            "copy_s": copy_s,
            "different": differing if options.verl_python else None,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
