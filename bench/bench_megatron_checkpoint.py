"""Measure checkpoint I/O and memory of MegatronEngine on two ranks.

    python bench/bench_megatron_checkpoint.py [--before COMMIT] [--rounds 2] [--json FILE]

Reports how much each rank writes and how much memory it needs to save, and the same for loading.
With --before, compares with the engine of an earlier commit whose modules have the same names;
processes of both take turns. Runs on the CPU with gloo. A peak is the largest growth of a rank's
memory, including files mapped into it.
"""

import argparse
import ctypes
import gc
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "packages/engine-megatron/src"
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}
ARCHITECTURE: Mapping[str, str | int | bool] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
"""13.4 million parameters; master weights and moments have 160 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurements of one rank; MB are millions of bytes."""

    written_mb: float
    """Bytes in this rank's files of the state."""
    save_s: float
    save_peak_mb: float
    staged_s: float
    """Time until training continues during a background save."""
    background_peak_mb: float
    """Peak from the call to the end of a background save."""
    opened_mb: float
    """Bytes of the tensors that loading read from the files."""
    load_s: float
    load_peak_mb: float


def _read_status_mb(field: str) -> float:
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{field}:")
    )
    return int(line.split()[1]) * 1024 / 1e6


def _measure(action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of an action, and its peak growth of memory in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed but unreturned memory would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    initial_mb, started = _read_status_mb("VmRSS"), time.perf_counter()
    action()
    return time.perf_counter() - started, _read_status_mb("VmHWM") - initial_mb


def _record_read_sizes() -> list[int]:
    """Return a list that grows by the bytes of each tensor that the engine reads from files."""
    import torch

    from temper_engine_api.checkpoint.saved_state import SavedState
    from temper_engine_megatron.checkpoint import checkpoint_files

    sizes: list[int] = []
    open_saved_state = checkpoint_files.open_saved_state

    def open_and_record(directory: str) -> SavedState:
        saved = open_saved_state(directory)

        def read(kind: str, name: str) -> torch.Tensor:
            tensor = saved.read(kind, name)
            sizes.append(tensor.nbytes)
            return tensor

        return replace(saved, read=read)

    # Replaces the only function through which the engine opens a checkpoint.
    checkpoint_files.open_saved_state = open_and_record
    return sizes


def measure_rank(layout: str, *, rank: int, folder: Path) -> Measurement:
    """Run an update, two saves and a load on one rank, after one warm-up of each."""
    import torch
    import torch.distributed as dist

    from temper_engine_api.batch import from_sequences
    from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec
    from temper_engine_megatron.config import MegatronConfig
    from temper_engine_megatron.engine import MegatronEngine

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2
    )
    config = MegatronConfig(
        model=ModelSpec(architecture=ARCHITECTURE),
        optimizer=OptimizerSpec(lr=1e-3),
        precision=PrecisionSpec(compute="fp32"),
        device="cpu",
        **LAYOUTS[layout],  # type: ignore[arg-type]
    )
    engine = MegatronEngine(config)
    engine.init_model()
    read_sizes = _record_read_sizes()
    with closing(engine):
        engine.set_loss_fn(
            lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
        )
        with engine.train_mode():
            engine.forward_backward_step(
                from_sequences([torch.arange(16)], loss_masks=[torch.arange(16) >= 1])
            )
        engine.optimizer_step()
        parts = folder / "parts"
        # The first call of each kind is warm-up, so that one-time allocations do not count.
        engine.write_part(str(parts / "0"))
        save_s, save_peak = _measure(lambda: engine.write_part(str(parts / "1")))
        written = sum(
            record.num_bytes
            for record in engine.write_part(str(parts / "2")).files
            if record.path.startswith("state/")
        )
        engine.save_checkpoint(str(folder), global_step=1, in_background=True)
        engine.finish_saving()
        staged_s = 0.0

        def save_in_background() -> None:
            nonlocal staged_s
            started = time.perf_counter()
            engine.save_checkpoint(str(folder), global_step=2, in_background=True)
            staged_s = time.perf_counter() - started
            engine.finish_saving()

        _, background_peak = _measure(save_in_background)
        engine.read_part(str(parts / "1"))
        read_sizes.clear()
        load_s, load_peak = _measure(lambda: engine.read_part(str(parts / "1")))
    return Measurement(
        written_mb=written / 1e6,
        save_s=save_s,
        save_peak_mb=save_peak,
        staged_s=staged_s,
        background_peak_mb=background_peak,
        opened_mb=sum(read_sizes) / 1e6,
        load_s=load_s,
        load_peak_mb=load_peak,
    )


def run(layout: str, *, sources: Path) -> list[Measurement]:
    """Run two ranks with the engine of a source folder."""
    path = os.pathsep.join([str(sources), str(ROOT / "packages/engine-api/src")])
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, __file__, "--work", layout, "--rank", str(rank), "--folder", folder]
            for rank in range(2)
        ]
        # A low threshold gives each tensor its own mapping, which is returned as soon as it is
        # freed.
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        ranks = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for command in commands
        ]
        try:
            outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank of {layout} with {sources} failed: see its output above.")
    return [Measurement(**json.loads(output.splitlines()[-1])) for output in outputs]


def prepare_sources(before: str | None, *, folder: Path) -> dict[str, Path]:
    """Return the engine's source folder by commit; unpack those of `before` into `folder`."""
    now = {"now": ROOT / SOURCES}
    if before is None:
        return now
    archive = subprocess.run(
        ["git", "archive", before, SOURCES], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return {before: folder / SOURCES} | now


def compare(before: str | None, *, rounds: int) -> dict[str, list[Measurement]]:
    """Return the best of the rounds of each rank, by layout and commit."""
    results: dict[str, list[Measurement]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sources_by_commit = prepare_sources(before, folder=Path(folder))
        for _ in range(rounds):
            for layout in LAYOUTS:
                for name, sources in sources_by_commit.items():
                    measured = run(layout, sources=sources)
                    key = f"{layout}, {name}"
                    results[key] = [
                        _select_best(*pair)
                        for pair in zip(results.get(key, measured), measured, strict=True)
                    ]
    return results


def _select_best(one: Measurement, other: Measurement) -> Measurement:
    return Measurement(
        **{name: min(value, asdict(other)[name]) for name, value in asdict(one).items()}
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="commit to compare with; default: none")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        print(json.dumps(asdict(measure_rank(chosen.work, rank=chosen.rank, folder=chosen.folder))))
        return
    load = os.getloadavg()[0]
    results = compare(chosen.before, rounds=chosen.rounds)
    print(f"load {load:.1f} before, best of {chosen.rounds}; rank 0 / rank 1\n")
    columns = list(asdict(next(iter(results.values()))[0]))
    print(f"| layout, commit | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for key, ranks in results.items():
        cells = [
            " / ".join(
                f"{asdict(rank)[name]:.{2 if name.endswith('_s') else 0}f}" for rank in ranks
            )
            for name in columns
        ]
        print(f"| {key} | {' | '.join(cells)} |")
    if chosen.json:
        chosen.json.write_text(
            json.dumps(
                {key: [asdict(rank) for rank in ranks] for key, ranks in results.items()}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
