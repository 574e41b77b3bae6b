r"""Measure FSDPEngine on CUDA: speed relative to a plain loop, scaling and numerical agreement.

    PYTHONPATH=packages/engine-api/src:packages/engine-fsdp/src:. \
        python -m tools.gpu.engine_fsdp --out FOLDER [--jobs one,four-0.5B,...]

Needs torch with CUDA, transformers and blake3; `checks` and `kernels` need pytest and hypothesis,
and `kernels` also liger-kernel and cut-cross-entropy. The jobs are sized for four GPUs of one host;
on fewer GPUs, tasks that need more are skipped.
A job is a wave of tasks that run in parallel in their own processes and on their own GPUs, with a
time limit. Rows are appended to FOLDER/rows.jsonl as soon as they are measured, and the output of
tasks to FOLDER/log.txt; the final table is also in FOLDER/table.txt. Tasks in FOLDER/finished.jsonl
are left out, so the same command continues after an interruption. `--rehearse` runs everything on a
CPU at a tiny size.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO

import torch

from temper_engine_fsdp.layouts import LAYOUTS
from tools.gpu.fsdp_table import format_table
from tools.gpu.workload import FinishedJobs, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One command and the number of GPUs that it reserves."""

    name: str
    """A job of `fsdp_jobs`; for a command, the name of the row with its exit status."""
    gpus: int = 1
    command: tuple[str, ...] = ()
    """Arguments to Python; empty runs the job `name` of `fsdp_jobs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Tasks that run in parallel under one time limit."""

    limit_s: float
    tasks: tuple[Task, ...] = field(default=())


def _make_speed_tasks(shape: str, *, gpus: int) -> tuple[Task, Task]:
    return Task(name=f"engine-{shape}", gpus=gpus), Task(name=f"plain-{shape}", gpus=gpus)


# Ignore the pytest settings of the repository, which turn warnings into errors: other versions of
# torch emit other warnings.
_PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-c",
    os.devnull,
    "--rootdir",
    ".",
    "-p",
    "no:cacheprovider",
    "--import-mode=importlib",
)
_ON_FSDP = (
    "-p",
    "temper_engine_api.conformance.plugin",
    "--pyargs",
    "temper_engine_api.conformance",
    "--engine",
    "fsdp",
)
_KIT = (*_PYTEST, *_ON_FSDP, "--results")
FOUR_RANK_LAYOUTS = tuple(layout.name for layout in LAYOUTS if layout.world_size == 4)
"""These layouts run on the CPU cores that the GPU tasks leave free."""


def _make_layout_task(name: str) -> Task:
    groups = "gradient,update,adapter,checkpoint,step_directory,weights"
    command = (*_KIT, f"{{out}}/layouts/{name}.json", "--layouts", name, "--groups", groups)
    return Task(name=f"kit, {name}", gpus=0, command=command)


WAVES: Mapping[str, Wave] = {
    "one": Wave(
        limit_s=150, tasks=(*_make_speed_tasks("0.5B", gpus=1), *_make_speed_tasks("1.5B", gpus=1))
    ),
    "four-0.5B": Wave(limit_s=100, tasks=_make_speed_tasks("0.5B", gpus=4)),
    "four-1.5B": Wave(limit_s=120, tasks=_make_speed_tasks("1.5B", gpus=4)),
    "two-0.5B": Wave(limit_s=60, tasks=_make_speed_tasks("0.5B", gpus=2)),
    "checks": Wave(
        limit_s=250,
        tasks=(
            *(_make_layout_task(name) for name in FOUR_RANK_LAYOUTS),
            Task(name="strategies", gpus=4),
            Task(
                name="kit",
                gpus=2,
                command=(
                    *_KIT,
                    "{out}/kit.json",
                    "--device",
                    "cuda",
                    "--world-sizes",
                    "1,2",
                    "--groups",
                    "gradient,logprob,update",
                ),
            ),
            Task(
                name="pytest",
                command=(*_PYTEST, "-m", "gpu", "packages/engine-fsdp/tests/test_gpu.py"),
            ),
            Task(name="background"),
        ),
    ),
    "two-1.5B": Wave(limit_s=70, tasks=_make_speed_tasks("1.5B", gpus=2)),
    "numbers": Wave(
        limit_s=60,
        tasks=(
            Task(name="compiled"),
            Task(name="attention"),
            Task(name="head"),
            Task(name="offload"),
        ),
    ),
    "eager": Wave(limit_s=90, tasks=(Task(name="eager-0.5B"), Task(name="eager-1.5B"))),
    "ranks": Wave(
        limit_s=60, tasks=(Task(name="ranks", gpus=2), Task(name="ranks"), Task(name="strategies"))
    ),
}
"""Jobs that run by default, most important first."""
TWO_GPU_WAVES: Mapping[str, Wave] = {
    "scaling-0.5B": Wave(
        limit_s=190, tasks=(*_make_speed_tasks("0.5B", gpus=1), *_make_speed_tasks("0.5B", gpus=2))
    ),
    "together-0.5B": Wave(
        limit_s=200, tasks=tuple(Task(name=f"engine-0.5B-by-{n}", gpus=2) for n in (4, 8, 2))
    ),
    "together-1.5B": Wave(limit_s=100, tasks=(Task(name="engine-1.5B-by-2", gpus=2),)),
    # The engine and the plain loop run one after the other, each on both GPUs.
    "level-0.5B": Wave(
        limit_s=190, tasks=(Task(name="engine-0.5B-by-8", gpus=2), Task(name="plain-0.5B", gpus=2))
    ),
    "level-1.5B": Wave(
        limit_s=190, tasks=(Task(name="engine-1.5B", gpus=2), Task(name="plain-1.5B", gpus=2))
    ),
    "kernels": Wave(
        limit_s=110,
        tasks=(
            Task(name="heads"),
            Task(
                name="pytest",
                command=(*_PYTEST, "-m", "gpu", "packages/engine-fsdp/tests/test_gpu.py"),
            ),
            Task(name="liger-0.5B"),
            Task(name="eager-0.5B"),
        ),
    ),
    "watcher": Wave(
        limit_s=60,
        tasks=(
            Task(
                name="watcher",
                gpus=2,
                command=("-m", "tools.gpu.fsdp_watcher", "--device", "{device}"),
            ),
        ),
    ),
    "ranks-2": Wave(
        limit_s=60, tasks=(Task(name="ranks", gpus=2), Task(name="strategies", gpus=2))
    ),
    "scaling-1.5B": Wave(
        limit_s=150, tasks=(*_make_speed_tasks("1.5B", gpus=1), *_make_speed_tasks("1.5B", gpus=2))
    ),
}
"""Jobs for a host with two GPUs; they run only if named with `--jobs`."""


class RunningTask:
    """The processes of a task and their captured output."""

    def __init__(self, task: Task, *, gpus: Sequence[int], options: argparse.Namespace) -> None:
        self.task = task
        self.gpus = gpus
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the task runs)
        cores = (os.cpu_count() or 1) // options.gpus
        # Ranks whose host threads compete for cores wait for each other in every step.
        threads = max(1, min(cores, 8)) if task.gpus else 1
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(options.entry_points), os.environ.get("PYTHONPATH", "")]
        )
        if not options.rehearse:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        command = [
            part.format(out=options.out, device="cpu" if options.rehearse else "cuda")
            for part in task.command
        ]
        if not command:
            command = [
                "-m",
                "tools.gpu.fsdp_jobs",
                task.name,
                "--world-size",
                str(task.gpus),
                "--rows",
                str(options.rows.path),
            ]
            command += ["--rehearse"] if options.rehearse else []
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def end(self, *, is_late: bool, options: argparse.Namespace) -> None:
        """Kill a late task and log its output; add a row if the task failed or is a command."""
        if is_late:
            # The task was started as a new session, so this also kills its rank processes.
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.output.seek(0)
        output = self.output.read().decode(errors="replace")
        self.output.close()
        with (options.out / "log.txt").open("a") as log:
            log.write(
                f"\n=== {self.task.name} on GPUs {list(self.gpus)}: status {status}\n"
                f"{output[-200_000:]}\n"
            )
        if status == 0:
            options.finished.add(self.task.name, self.task.gpus)
        if status != 0 or self.task.command:
            lines = output.strip().splitlines()
            options.rows.add(
                {
                    "job": self.task.name,
                    "world_size": self.task.gpus,
                    "seconds": round(time.monotonic() - self.started, 1),
                    "status": "killed at its limit" if is_late else status,
                    "last_line": " | ".join(lines[-1:]),
                    "ok": status == 0,
                }
            )


def write_entry_points(folder: Path) -> None:
    """Write the metadata of packages in a checkout to a folder, which belongs on PYTHONPATH.

    Engines are then found by name, and `temper-train` finds its version. pytest finds the
    conformance kit.
    """
    packages = Path(__file__).resolve().parents[2] / "packages"
    for package in ("engine-api", "engine-fsdp", "engine-megatron", "trainer"):
        project = tomllib.loads((packages / package / "pyproject.toml").read_text())["project"]
        name = project["name"]
        fields = f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n"
        metadata = folder / f"{name.replace('-', '_')}-{project['version']}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(fields)
        lines = []
        for group, entries in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@contextmanager
def provide_entry_points() -> Iterator[None]:
    """Let this process and its children find the engines of a checkout that is not installed."""
    if entry_points(group="temper.engines", name="fsdp"):
        yield
        return
    previous = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="entry-points-") as folder:
        write_entry_points(Path(folder))
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{previous or ''}"
        try:
            yield
        finally:
            sys.path.remove(folder)
            if previous is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = previous


def run_wave(wave: Wave, *, limit_s: float, options: argparse.Namespace) -> None:
    """Run tasks in parallel as far as GPUs are free; kill those that run when time is up."""
    deadline = time.monotonic() + limit_s
    waiting = [task for task in wave.tasks if not options.finished.contain(task.name, task.gpus)]
    running, free = list[RunningTask](), list(range(options.gpus))
    while waiting or running:
        for task in [t for t in waiting if t.gpus > options.gpus]:
            waiting.remove(task)
            print(
                f"{task.name} skipped: it needs {task.gpus} GPUs, and there are {options.gpus}",
                flush=True,
            )
        while waiting and waiting[0].gpus <= len(free):
            task = waiting.pop(0)
            assigned, free = free[: task.gpus], free[task.gpus :]
            running.append(RunningTask(task, gpus=assigned, options=options))
        time.sleep(0.2)
        is_late = time.monotonic() > deadline
        for current in [r for r in running if is_late or r.process.poll() is not None]:
            running.remove(current)
            free = sorted([*free, *current.gpus])
            current.end(is_late=current.process.poll() is None, options=options)
        if is_late and waiting:
            print(f"no time left for {', '.join(task.name for task in waiting)}", flush=True)
            return


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--jobs",
        default=",".join(WAVES),
        help=f"comma-separated, in order; the default jobs, and {', '.join(TWO_GPU_WAVES)}",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=560.0,
        help="time for all jobs; jobs that do not fit are skipped",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run on the CPU at a tiny size; pytest commands run unchanged",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.rows = Rows(path=options.out / "rows.jsonl")
    options.rows.path.touch()
    options.finished = FinishedJobs(path=options.out / "finished.jsonl")
    options.gpus = 4 if options.rehearse else torch.cuda.device_count()
    (options.out / "layouts").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="entry-points-") as folder:
        options.entry_points = Path(folder)
        if not entry_points(group="temper.engines", name="fsdp"):
            write_entry_points(options.entry_points)
        run_jobs(options)
    print(format_table(options.rows.read()))


def run_jobs(options: argparse.Namespace) -> None:
    """Run the waves in order while time is left."""
    deadline = time.monotonic() + options.budget_s
    for job in options.jobs.split(","):
        left = deadline - time.monotonic()
        if left < 15:
            print(
                f"{job}: skipped, because the budget of {options.budget_s:.0f} s is used up",
                flush=True,
            )
            continue
        started, wave = time.monotonic(), {**WAVES, **TWO_GPU_WAVES}[job]
        run_wave(
            wave, limit_s=min(wave.limit_s * (5 if options.rehearse else 1), left), options=options
        )
        print(f"{job}: {time.monotonic() - started:.0f} s", flush=True)
        (options.out / "table.txt").write_text(format_table(options.rows.read()))


if __name__ == "__main__":
    main()
