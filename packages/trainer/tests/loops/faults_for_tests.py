"""Runs of `temper-train` that are disturbed at random, and what each of them leaves. Linux only.

    python faults_for_tests.py --folder FOLDER --seeds 0,1,2

One line of JSON per case. This process trains one step and then forks a driver for every start, so
that a start costs a second; every fifth case starts the program as a user does. Faults are real
signals, real full file systems and real damage.
"""

import argparse
import atexit
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
STEPS, PROMPTS_PER_STEP = 5, 2
SETTINGS = (
    "warm_start=null",
    "data.eval=null",
    "data.train.max_rows=16",
    "sampling.max_tokens=4",
    f"batching.prompts_per_step={PROMPTS_PER_STEP}",
    "run.save_model=false",
    "run.progress=false",
    "run.stop_grace_s=6",
    f"run.total_steps={STEPS}",
    "run.trackers=[jsonl]",
    "reward.function=temper_trainer_test_rewards:hangs_on_request",
    "reward.timeout_s=1000",
    "run.resume=auto",
)
START_LIMIT_S = 900.0
"""A start that takes longer hangs; far above its time on a busy machine."""
LEFTOVERS_AFTER_S = 10.0
SILENCE_S = 1.0
"""Time without progress after which a supervisor ends a run in which something hangs."""

KINDS = (
    "SIGKILL",
    "SIGTERM",
    "damaged checkpoint",
    "full disk",
    "reward function hangs",
    "two processes",
    "reward process killed",
    "Ctrl-C",
    "driver stopped",
    "reward process stopped",
)
"""The everyday tests run the first case of each kind."""
LOOPS = ("async", "one_step_off")
FIRST_LOOP_SEED = 30_000
"""First seed of the cases that run in one process with a loop that samples ahead of training."""
FIRST_ASYNC_VLLM_SEED = 40_000
"""First seed of the cases on a vLLM server with loop async."""
SERVER_MODULE = "temper_trainer.rollout.vllm.server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Ray or a vLLM server, on which the cases from a seed on run."""

    name: str
    first_seed: int
    kinds: tuple[str, ...]
    overrides: tuple[str, ...]
    has_own_numbers: bool
    """True if the undisturbed run has this backend, too, and is not in one process."""
    mismatch_tolerance: float = 0.0
    """Difference allowed in `mismatch/*`, the metrics that compare log-probs with the sampler."""


BACKENDS = (
    Backend(
        name="vLLM",
        first_seed=20_000,
        kinds=("SIGKILL", "vLLM server killed", "SIGTERM", "vLLM server stopped"),
        overrides=(
            "rollout=vllm",
            f"runtime.rollout_python={os.environ.get('TEMPER_ROLLOUT_PYTHON', sys.executable)}",
            "rollout.vllm.kv_cache_bytes=67108864",
            "rollout.vllm.enforce_eager=true",
            "rollout.vllm.stall_timeout_s=20",
            "rollout.max_concurrent=16",
            # Heads of 32, because vLLM's attention on CPUs has no smaller ones.
            "actor.engine.model.architecture.hidden_size=128",
        ),
        has_own_numbers=True,
        # vLLM's log-probs differ in their last bits between two undisturbed runs, too.
        mismatch_tolerance=1e-6,
    ),
    Backend(
        name="Ray",
        first_seed=10_000,
        kinds=("SIGKILL", "Ray actor killed", "SIGTERM", "Ray's raylet killed"),
        overrides=("runtime.kind=ray", "runtime.cpus_per_worker=0.5"),
        has_own_numbers=False,
    ),
)
"""The last seeds first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One disturbance of one start."""

    kind: str
    moment: str
    """start, step or save."""
    step: int
    """Step that has been logged, or that is being saved, when the fault begins."""
    delay_s: float
    """Added to the moment."""

    @property
    def when(self) -> str:
        """The moment in words."""
        if self.kind == "full disk":
            return "when the disk is full"
        if self.kind == "two processes":
            return f"{self.delay_s:.2f} s after the first"
        phase = {
            "start": "start",
            "step": f"step {self.step}",
            "save": f"save of step {self.step}",
        }[self.moment]
        return f"{phase} + {self.delay_s:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Settings and faults drawn from a seed."""

    seed: int
    faults: tuple[Fault, ...]
    save_every: int
    in_background: bool
    num_workers: int
    is_cold: bool
    """True if each start is a new interpreter."""
    backend: Backend | None = None
    """None for a run in one process."""
    loop: str = "sync"

    @property
    def overrides(self) -> list[str]:
        """Settings of this case alone."""
        return [
            f"loop={self.loop}",
            f"run.save_every={self.save_every}",
            f"run.save_in_background={str(self.in_background).lower()}",
            f"reward.num_workers={self.num_workers}",
            *(self.backend.overrides if self.backend is not None else ()),
        ]


@dataclass(slots=True, kw_only=True)
class Row:
    """Result of one case."""

    seed: int
    fault: str
    when: str
    starts: int = 0
    repeated: int = 0
    """Logged steps that were computed again, over all restarts."""
    equal: bool | None = False
    """None if a resumed run has other numbers, because it samples again what it had ahead."""
    leftovers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Reason of the failure; empty if the case passed."""
    seconds: float = 0.0


def draw_case(seed: int) -> Case:
    """Return the case of a seed; ten consecutive seeds contain every kind once."""
    draw = random.Random(seed)
    loop = "sync"
    backend = next((backend for backend in BACKENDS if seed >= backend.first_seed), None)
    if seed >= FIRST_ASYNC_VLLM_SEED:
        loop = "async"
    elif seed >= FIRST_LOOP_SEED:
        loop, backend = draw.choice(LOOPS), None
    if backend is not None:
        kind = backend.kinds[seed % len(backend.kinds)]
        return Case(
            seed=seed,
            faults=(_draw_fault(kind, draw),),
            save_every=1,
            in_background=draw.random() < 0.3,
            num_workers=0,
            is_cold=True,  # Ray does not support a driver that was forked
            backend=backend,
            loop=loop,
        )
    kinds = [KINDS[seed % len(KINDS)]]
    if seed >= len(KINDS) and draw.random() < 0.4:
        kinds.append(draw.choice(KINDS))
    return Case(
        seed=seed,
        faults=tuple(_draw_fault(kind, draw) for kind in kinds),
        save_every=draw.choice([1, 1, 1, 2]),
        in_background=draw.random() < 0.3,
        num_workers=int(any(kind.startswith("reward process") for kind in kinds)),
        is_cold=seed >= len(KINDS) and (seed // len(KINDS) + seed) % 5 == 0,
        loop=loop,
    )


def _draw_fault(kind: str, draw: random.Random) -> Fault:
    moment = draw.choice(["start", "step", "step", "save", "save"])
    if kind == "damaged checkpoint" or kind.startswith(("reward", "Ray", "vLLM")):
        moment = "step"
    delay_s = (
        draw.uniform(0, 2)
        if moment == "start"
        else draw.uniform(0, 0.4)
        if moment == "step"
        else draw.uniform(0, 0.05)
    )
    if kind == "two processes":
        delay_s = draw.uniform(0, 1)
    # What is done to rewards needs a step that follows.
    last = STEPS - 2 if kind.startswith(("reward", "Ray", "vLLM")) else STEPS - 1
    return Fault(kind=kind, moment=moment, step=draw.randint(1, last), delay_s=delay_s)


def damage(checkpoint: Path, draw: random.Random) -> None:
    """Apply one random kind of damage to a checkpoint."""
    victim = draw.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    content = victim.read_bytes()
    match draw.choice(["flip", "cut", "empty", "delete", "garbage", "no manifest", "nothing"]):
        case "flip":
            position = draw.randrange(len(content))
            flipped = content[position] ^ 1 << draw.randrange(8)
            victim.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        case "cut":
            victim.write_bytes(content[: draw.randrange(len(content))])
        case "empty":
            victim.write_bytes(b"")
        case "delete":
            victim.unlink()
        case "garbage":
            victim.write_bytes(draw.randbytes(len(content)))
        case "no manifest":
            (checkpoint / "manifest.json").unlink()
        case "nothing":
            shutil.rmtree(checkpoint)


class Start:
    """One start of the program: a process that leads a session of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        overrides: Sequence[str],
        is_cold: bool,
        log: Path,
        temporary: Path,
        max_file_bytes: int | None = None,
    ) -> None:
        self.log = log
        self._seen: dict[int, str] = {}
        self._begin = log.stat().st_size if log.exists() else 0
        arguments = [*_base_settings(), *SETTINGS, f"run.dir={folder / 'disk' / 'run'}", *overrides]
        # Everything the run makes is below folders of the case: nothing of other programs is
        # mistaken for a leftover.
        environment = {
            "TMPDIR": str(temporary),
            "TEMPER_TEST_HANG": str(folder / "hang"),
            "PYTHONPATH": str(HERE),
            "OMP_NUM_THREADS": "1",
        }
        # A variable that all processes inherit; a vLLM server has another TMPDIR.
        self._mark = f"TEMPER_TEST_HANG={environment['TEMPER_TEST_HANG']}\0".encode()
        self._popen: subprocess.Popen[bytes] | None = None
        if is_cold:
            with log.open("ab") as output:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", "temper_trainer", *arguments],
                    env=os.environ | environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    preexec_fn=lambda: _become_driver(max_file_bytes),  # noqa: PLW1509  no threads here
                )
            self.pid = self._popen.pid
        else:
            context = multiprocessing.get_context("fork")
            self._fork = context.Process(
                target=_drive, args=(arguments, environment, folder, log, max_file_bytes)
            )
            self._fork.start()
            self.pid = self._fork.pid or 0

    def poll(self) -> int | None:
        """Return the exit code, or None while the process lives."""
        return self._popen.poll() if self._popen is not None else self._fork.exitcode

    def wait(self, limit_s: float) -> int | None:
        """Return the exit code, or None if the process lives on after the limit."""
        deadline = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the driver, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def output(self) -> str:
        """Return what this start has printed."""
        return (
            self.log.read_bytes()[self._begin :].decode(errors="replace")
            if self.log.exists()
            else ""
        )

    def children(self) -> list[int]:
        """Return the other processes of the session, or that have the case's folder.

        Processes of Ray and vLLM overwrite their environment with their title, so those that an
        earlier call has seen are recognized by their start time.
        """
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            pid = int(process.name)
            try:
                # Any process may have a name that is no UTF-8.
                stat = (process / "stat").read_text(errors="replace")
                fields = stat.rpartition(")")[2].split()
                is_of_case = (
                    int(fields[3]) == self.pid
                    or self._seen.get(pid) == fields[19]
                    or self._mark in (process / "environ").read_bytes()
                )
            except OSError:
                continue
            if is_of_case and fields[0] not in "ZX" and pid != self.pid:
                self._seen[pid] = fields[19]
                pids.append(pid)
        return pids

    def reward_processes(self) -> list[int]:
        """Return the children that score, which are the spawned ones."""
        return self.children_named("spawn_main")

    def children_named(self, word: str) -> list[int]:
        """Return the children whose command line has a word."""
        return [pid for pid in self.children() if word in _command_line(pid)]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _base_settings() -> tuple[str, ...]:
    from conftest import SMALL  # imports torch, which a spawned reward process must not wait for

    return SMALL


def _become_driver(max_file_bytes: int | None) -> None:
    os.setsid()
    if max_file_bytes is not None:
        # A write beyond it fails with EFBIG, where a file system of this size would say ENOSPC.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))


def _drive(
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    log: Path,
    max_file_bytes: int | None,
) -> None:
    """Run `temper-train` in a forked process."""
    _become_driver(max_file_bytes)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(folder)
    from temper_trainer.__main__ import main

    code = 1
    try:
        code = main(arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them
    sys.exit(code)


def logged_steps(run: Path) -> int:
    """Return the last step that metrics.jsonl has a complete line of; 0 without one."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def logged_numbers(run: Path) -> list[dict[str, float]]:
    """Return the logged rows without what a clock or a meter measured."""
    from conftest import CLOCKS, METERS

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(CLOCKS) and not any(meter in name for meter in METERS)
        }
        for row in rows
    ]


def is_equal(
    rows: Sequence[Mapping[str, float]],
    expected: Sequence[Mapping[str, float]],
    *,
    mismatch_tolerance: float,
) -> bool:
    """Compare logged rows bit for bit, but `mismatch/*` with a tolerance."""

    def drop_mismatch(logged: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
        return [
            {name: 0.0 if name.startswith("mismatch/") else value for name, value in row.items()}
            for row in logged
        ]

    return drop_mismatch(rows) == drop_mismatch(expected) and all(
        abs(value - before[name]) <= mismatch_tolerance
        for row, before in zip(rows, expected, strict=True)
        for name, value in row.items()
        if name.startswith("mismatch/")
    )


def list_complete_steps(run: Path) -> list[int]:
    """Return the steps of the committed checkpoints, the newest first."""
    step_names = (
        path.parent.name.removeprefix("step_")
        for path in (run / "checkpoints").glob("step_*/manifest.json")
    )
    return sorted((int(step) for step in step_names if step.isdigit()), reverse=True)


class CaseRunner:
    """Runs one case and collects its row."""

    def __init__(self, case: Case, *, folder: Path, expected: list[dict[str, float]]) -> None:
        """Prepare a case; only one with loop sync is compared with expected numbers."""
        self.case, self.folder, self.expected = case, folder, expected
        self.run = folder / "disk" / "run"
        # The names of sockets of Ray and vLLM may have 107 characters.
        self.temporary = (
            Path(tempfile.mkdtemp(prefix="tf-", dir="/tmp")) if case.backend else folder / "tmp"
        )
        self.draw = random.Random(f"run {case.seed}")
        self.pids: list[int] = []
        self.may_repeat = 0
        words = "; ".join(fault.when for fault in case.faults)
        settings = (
            (f"on {case.backend.name}, " if case.backend else "")
            + (f"loop {case.loop}, " if case.loop != "sync" else "")
            + f"saves every {case.save_every}"
            + (", in background" if case.in_background else "")
            + (", cold" if case.is_cold else "")
        )
        kinds = " and ".join(fault.kind for fault in case.faults)
        self.row = Row(seed=case.seed, fault=f"{kinds} ({settings})", when=words)

    def result(self) -> Row:
        """Run until the command ends by itself, and compare."""
        begin = time.monotonic()
        for path in (self.folder / "disk", self.temporary):
            path.mkdir(parents=True, exist_ok=True)
        faults = list(self.case.faults)
        has_disk = any(fault.kind == "full disk" for fault in faults)
        with small_disk(self.folder / "disk", is_enabled=has_disk) as resize:
            code: int | None = None
            while code != 0 and self.row.starts <= len(self.case.faults):
                code = self._start(faults.pop(0) if faults else None, resize=resize)
                if code is None:
                    self.row.problems.append(f"a start did not end within {START_LIMIT_S:.0f} s")
                    break
                if code == 2:
                    self.row.problems.append("a start was refused")
                    break
            if code != 0:
                self.row.problems.append(f"the last start ended with exit code {code}")
            else:
                self._compare()
            if self.row.problems:
                shutil.copytree(self.folder / "disk", self.folder / "copy", dirs_exist_ok=True)
        self.row.seconds = round(time.monotonic() - begin, 1)
        return self.row

    def _new(self, **more: int | None) -> Start:
        self.row.starts += 1
        start = Start(
            self.folder,
            overrides=self.case.overrides,
            is_cold=self.case.is_cold,
            log=self.folder / f"start-{self.row.starts}.log",
            temporary=self.temporary,
            **more,
        )
        self.pids.append(start.pid)
        return start

    def _start(self, fault: Fault | None, *, resize: Callable[[int | None], bool]) -> int | None:
        before, may_repeat = logged_steps(self.run), self.may_repeat
        # A background save of a step is committed before the next saved step is logged.
        num_logged = 2 * self.case.save_every - 1
        self.may_repeat = num_logged if self.case.in_background else self.case.save_every
        max_file_bytes = None
        if fault is not None and fault.kind == "full disk":
            # Between one small file and all that a run writes.
            size = self.draw.randint(4, 90) * 4096
            if not resize(size):
                max_file_bytes = size
        else:
            resize(None)
        start = self._new(max_file_bytes=max_file_bytes)
        code = (
            self._second_process(start, fault)
            if fault and fault.kind == "two processes"
            else self._disturb(start, fault)
        )
        if code is None:
            for pid in [start.pid, *start.children()]:
                os.kill(pid, signal.SIGKILL)
            return None
        self._count_repeated(start, before=before, may_repeat=may_repeat)
        self._wait_for_children(start)
        if fault is not None and fault.kind == "damaged checkpoint":
            self._damage()
        return code

    def _disturb(self, start: Start, fault: Fault | None) -> int | None:
        if fault is not None and fault.kind != "full disk":
            self._wait_for_moment(start, fault)
            time.sleep(fault.delay_s)
            if start.poll() is None:
                self._act(start, fault)
            else:
                self.row.when += " (the run had ended)"
        return start.wait(START_LIMIT_S)

    def _act(self, start: Start, fault: Fault) -> None:
        match fault.kind:
            case "SIGKILL" | "damaged checkpoint":
                start.send(signal.SIGKILL)
            case "SIGTERM":
                start.send(signal.SIGTERM)
                if self.draw.random() < 0.3:  # a scheduler without patience
                    time.sleep(self.draw.uniform(0, 1))
                    start.send(signal.SIGKILL)
            case "Ctrl-C":
                start.send(signal.SIGINT)
                if self.draw.random() < 0.3:
                    time.sleep(self.draw.uniform(0, 0.5))
                    start.send(signal.SIGINT)
            case "driver stopped":
                start.send(signal.SIGSTOP)
                time.sleep(SILENCE_S)
                start.send(self.draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGCONT]))
            case "reward process killed":
                self._signal_reward_process(start, signal.SIGKILL)
            case "Ray actor killed":
                os.kill(self.draw.choice(start.children_named("ray::RoleActor")), signal.SIGKILL)
            case "Ray's raylet killed":
                os.kill(start.children_named("/raylet ")[0], signal.SIGKILL)
            case "vLLM server killed":
                os.kill(self.draw.choice(self._list_server_processes(start)), signal.SIGKILL)
            case "vLLM server stopped":
                for pid in self._list_server_processes(start):
                    os.kill(pid, signal.SIGSTOP)
            case "reward process stopped":
                self._signal_reward_process(start, signal.SIGSTOP)
                self._end_silent_run(start)
            case "reward function hangs":
                mark = self.folder / "hang"
                mark.touch()
                while start.poll() is None and mark.exists():
                    time.sleep(0.02)
                if mark.exists():
                    mark.unlink()
                    self.row.when += " (no call followed)"
                    return
                self._end_silent_run(start)

    def _list_server_processes(self, start: Start) -> list[int]:
        """Return the processes of the vLLM server, whose workers change their titles."""
        return [*start.children_named(SERVER_MODULE), *start.children_named("VLLM::")]

    def _signal_reward_process(self, start: Start, number: signal.Signals) -> None:
        for pid in start.reward_processes():
            os.kill(pid, number)

    def _end_silent_run(self, start: Start) -> None:
        time.sleep(SILENCE_S)
        start.send(self.draw.choice([signal.SIGKILL, signal.SIGTERM]))

    def _second_process(self, first: Start, fault: Fault) -> int | None:
        """Start the command a second time: only one of the two may train."""
        time.sleep(fault.delay_s)
        second = self._new()
        self.row.starts -= 1  # the second one was not needed
        codes = [first.wait(START_LIMIT_S), second.wait(START_LIMIT_S)]
        # The second one is refused, or finds the work done.
        if sorted(codes, key=str) not in ([0, 2], [0, 0]):
            self.row.problems.append(f"two processes ended with exit codes {codes}")
        self._wait_for_children(second)
        return min((code for code in codes if code is not None), default=None)

    def _wait_for_moment(self, start: Start, fault: Fault) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while start.poll() is None and time.monotonic() < deadline:
            if fault.moment == "start":
                return
            if self.case.backend is not None:
                start.children()
            steps = logged_steps(self.run)
            if steps > fault.step or (fault.moment == "step" and steps == fault.step):
                return
            if fault.moment == "save" and any(
                f"{fault.step:08d}" in path.name for path in (self.run / "checkpoints").glob("*")
            ):
                return
            time.sleep(0.01)

    def _count_repeated(self, start: Start, *, before: int, may_repeat: int) -> None:
        output = start.output()
        if "continuing from step " in output:
            resumed = int(output.split("continuing from step ")[1].split()[0])
        elif "rl 1/" in output:
            resumed = 0
        else:
            # It ended before it trained, so the next start has to repeat what this one had to.
            self.may_repeat = max(self.may_repeat, may_repeat)
            return
        repeated = max(0, before - resumed)
        self.row.repeated += repeated
        if repeated > may_repeat:
            self.row.problems.append(
                f"{repeated} steps were repeated, expected at most {may_repeat}"
            )

    def _damage(self) -> None:
        steps = list_complete_steps(self.run)
        num_damaged = self.draw.randint(1, 2)
        for step in steps[:num_damaged]:
            damage(self.run / "checkpoints" / f"step_{step:08d}", self.draw)
        good = max(steps[num_damaged:], default=0)
        self.may_repeat = max(self.may_repeat, logged_steps(self.run) - good)

    def _wait_for_children(self, start: Start) -> None:
        deadline = time.monotonic() + LEFTOVERS_AFTER_S
        while (children := start.children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in children:
            self.row.leftovers.append(f"process {_command_line(pid)[:120]}")
            os.kill(pid, signal.SIGKILL)

    def _compare(self) -> None:
        if self.case.loop == "sync":
            backend = self.case.backend
            self.row.equal = is_equal(
                logged_numbers(self.run),
                self.expected,
                mismatch_tolerance=0.0 if backend is None else backend.mismatch_tolerance,
            )
            if not self.row.equal:
                self.row.problems.append("metrics.jsonl differs from that of the undisturbed run")
        else:
            self.row.equal = None
            self._check_ahead()
        left = [path for path in self.temporary.iterdir() if not path.name.startswith("ray-")]
        # The folder with Ray's logs stays until the next start.
        sessions = [path for path in self.temporary.glob("ray-*/r/*") if not path.is_symlink()]
        left += [path for path in sessions if not path.name.endswith(f"_{self.pids[-1]}")]
        self.row.leftovers += [f"TMPDIR/{path.relative_to(self.temporary)}" for path in left]
        shared = [path.name for path in Path("/dev/shm").glob("temper-*")]
        self.row.leftovers += [
            name for name in shared if any(f"-{pid}-" in name for pid in self.pids)
        ]
        if (self.run / "run.lock").exists():
            self.row.leftovers.append("run.lock")
        if self.row.leftovers:
            self.row.problems.append("something was left over")

    def _check_ahead(self) -> None:
        """Check what does not depend on the start at which a batch was sampled."""
        rows = logged_numbers(self.run)
        steps = [row["step"] for row in rows]
        if steps != list(range(1, STEPS + 1)):
            self.row.problems.append(f"metrics.jsonl has the steps {steps}")
        if (staleness := max(row["staleness/max"] for row in rows)) > 1:
            self.row.problems.append(f"the staleness was {staleness:g}, expected at most 1")
        checkpoint = self.run / "checkpoints" / f"step_{STEPS:08d}"
        cursor = json.loads((checkpoint / "trainer" / "state.json").read_text())["cursor"]
        # Fewer prompts than rows, so the first epoch has not ended.
        if (cursor["epoch"], cursor["index"]) != (0, STEPS * PROMPTS_PER_STEP):
            self.row.problems.append(f"prompts were lost or trained twice: {cursor}")


@contextmanager
def small_disk(mount_point: Path, *, is_enabled: bool) -> Iterator[Callable[[int | None], bool]]:
    """Mount a file system whose size the body can change; yields a function that says if it did.

    Root alone can mount. The size None is one that no run fills.
    """
    if not is_enabled or not _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount_point)):
        yield lambda size: False
        return
    try:
        yield lambda size: _mount("-o", f"remount,size={size or 1 << 26}", str(mount_point))
    finally:
        kept = mount_point.parent / "kept"
        shutil.copytree(mount_point, kept)
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)
        mount_point.rmdir()
        kept.rename(mount_point)


def _mount(*arguments: str) -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
    )


def warm_up(folder: Path) -> None:
    """Train a step in this process, so that forks need not import and initialize the same."""
    from temper_trainer.config_loading import load, write_resolved
    from temper_trainer.loops import train

    sys.path.insert(0, str(HERE))
    settings = [*_base_settings(), *SETTINGS, "run.total_steps=1", f"run.dir={folder / 'run'}"]
    loaded = load(settings)
    os.environ["TEMPER_TEST_HANG"] = str(folder / "hang")
    # Rows of JSON alone are printed.
    with redirect_stdout(sys.stderr):
        train(
            loaded.config,
            digest=loaded.digest,
            write_config=lambda directory: write_resolved(loaded, directory),
        )
    importlib.import_module("temper_trainer.__main__")


def undisturbed(folder: Path, *, backend: Backend | None) -> list[dict[str, float]]:
    """Run once without a fault, and return its numbers.

    Raises:
        RuntimeError: If it fails.
    """
    (folder / "disk").mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="tf-", dir="/tmp") as temporary:
        start = Start(
            folder,
            overrides=() if backend is None else backend.overrides,
            is_cold=backend is not None,
            log=folder / "start.log",
            temporary=Path(temporary),
        )
        code = start.wait(START_LIMIT_S)
    if code != 0:
        raise RuntimeError(f"the undisturbed run failed: {start.output()[-3000:]}")
    return logged_numbers(folder / "disk" / "run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases one after another; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the runs are made; what passed is deleted"
    )
    parser.add_argument("--seeds", required=True, help="comma-separated")
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=chosen.folder))
    warm_up(folder / "warm-up")
    expected: dict[Backend | None, list[dict[str, float]]] = {}
    has_failed = False
    for seed in map(int, chosen.seeds.split(",")):
        own = folder / f"case-{seed}"
        case = draw_case(seed)
        backend = (
            case.backend if case.backend is not None and case.backend.has_own_numbers else None
        )
        if case.loop == "sync" and backend not in expected:
            name = "undisturbed" if backend is None else f"undisturbed-{backend.name}"
            expected[backend] = undisturbed(folder / name, backend=backend)
        runner = CaseRunner(case, folder=own, expected=expected.get(backend, []))
        row = runner.result()
        if row.problems:
            has_failed = True
        else:
            shutil.rmtree(own)
        if case.backend is not None:
            shutil.rmtree(runner.temporary)
        print(json.dumps(asdict(row)), flush=True)  # noqa: T201  read by the test and the campaign
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
