"""Check for processes and files that killed, stopped and finished runs leave behind."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from temper_engine_api.process_folders import FOLDER_NAME, make_folder_path

from .conftest import SMALL

pytestmark = [
    # Nightly: starts and kills complete runs, with Ray and vLLM, and waits until their processes
    # end.
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="needs Linux, whose /proc shows processes and whose /dev/shm shows files",
    ),
]

SHORT_RUN = (
    *SMALL,
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.progress=false",
    "sampling.max_tokens=12",
    # Heads of 32, because vLLM's attention on CPUs has no smaller ones.
    "actor.engine.model.architecture.hidden_size=128",
)
ON_RAY = ("runtime.kind=ray", "runtime.cpus_per_worker=0.5")
ENDLESS = ("run.total_steps=100000",)
RAY_LOGS = re.compile(r"ray-[0-9]+/r/session_")
"""A folder that is kept until the next run, because it has Ray's logs."""
LIMIT_S = 10.0
"""Seconds until the last process must have ended."""

RAY = pytest.param("ray", marks=pytest.mark.ray)
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
RAY_AND_VLLM = pytest.param("ray and vllm", marks=[pytest.mark.ray, pytest.mark.vllm])


def overrides_of(kind: str) -> tuple[str, ...]:
    """Return the settings of a run on Ray, on a vLLM server, or on both."""
    overrides: tuple[str, ...] = ()
    if "ray" in kind:
        pytest.importorskip(
            "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
        )
        overrides += ON_RAY
    if "vllm" in kind:
        named = os.environ.get("TEMPER_ROLLOUT_PYTHON")
        if named is None and importlib.util.find_spec("vllm") is None:
            pytest.skip(
                "vLLM is neither installed here nor named by TEMPER_ROLLOUT_PYTHON: nox -s vllm "
                "runs this"
            )
        overrides += (
            "rollout=vllm",
            f"runtime.rollout_python={named or sys.executable}",
            "rollout.vllm.kv_cache_bytes=67108864",
            "rollout.vllm.enforce_eager=true",
            "rollout.max_concurrent=16",
        )
    return overrides


def start_time(process: int) -> str | None:
    """Return when a process started; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in ("Z", "X") else fields[18]


def find_mapped(processes: Iterable[Path]) -> set[str]:
    """Return the inodes of files in shared memory that processes, given in /proc, map."""
    mapped: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            # Inodes, because the C library renames a semaphore's file after mapping it.
            mapped |= {
                line.split()[4]
                for line in (process / "maps").read_text().splitlines()
                if "/dev/shm/" in line
            }
    return mapped


@dataclass
class Site:
    """A temporary directory of its own, and everything that was started with it."""

    folder: Path
    shared_before: frozenset[str]
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    seen: dict[int, str] = field(default_factory=dict)
    mapped: set[str] = field(default_factory=set)
    """Inodes of files in shared memory that processes of this site were seen to map."""
    runs: int = 0

    @property
    def log(self) -> str:
        return "".join(
            path.read_text(errors="replace") for path in sorted(self.folder.parent.glob("*.log"))
        )

    def start(self, run: Path, *overrides: str) -> "subprocess.Popen[bytes]":
        """Start a run in a process of its own."""
        here = str(Path(__file__).parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {
            "PYTHONPATH": path,
            "TMPDIR": str(self.folder),
            "TEMPER_TEST_SITE": self.token,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "temper_trainer", *SHORT_RUN, f"run.dir={run}", *overrides]
        self.runs += 1
        with (self.folder.parent / f"{self.runs}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.look()
        return process

    def finish(self, run: Path, *overrides: str) -> None:
        """Run to the end."""
        process = self.start(run, *overrides)
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.2)
        assert process.poll() == 0, self.log[-5000:]

    def wait_for(self, process: "subprocess.Popen[bytes]", condition: Callable[[], bool]) -> None:
        """Wait for a condition, noting all processes on the way."""
        deadline = time.monotonic() + 600
        while not condition():
            assert process.poll() is None, self.log[-5000:]
            assert time.monotonic() < deadline, self.log[-5000:]
            self.look()
            time.sleep(0.05)
        self.look()
        self.mapped |= find_mapped(Path(f"/proc/{process}") for process in self.seen)

    def look(self) -> None:
        """Note which processes there are, also those that will hide their environment later."""
        entry = f"TEMPER_TEST_SITE={self.token}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0") and (
                    start := start_time(int(folder.name))
                ):
                    self.seen[int(folder.name)] = start

    def alive(self) -> list[str]:
        """Return the command lines of processes that are still there."""
        self.look()
        names = []
        for process, start in self.seen.items():
            if start_time(process) == start:
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{process}/cmdline").read_bytes()
                    names.append(f"{process} {command.replace(bytes(1), b' ').decode()[:150]}")
        return names

    def process(self, word: str) -> int:
        """Return the id of the newest process whose command line has a word; 0 if there is none."""
        matching = [entry for entry in self.alive() if word in entry.partition(" ")[2]]
        return int(matching[-1].split()[0]) if matching else 0

    def check_processes(self) -> float:
        """Wait until no process is left; returns how long that took."""
        begin = time.monotonic()
        while (left := self.alive()) and time.monotonic() - begin < LIMIT_S:
            time.sleep(0.1)
        assert left == [], "\n".join(left)
        return time.monotonic() - begin

    def shared_files(self) -> list[str]:
        """Return files in shared memory, which no living process maps."""
        names = frozenset(os.listdir("/dev/shm")) - self.shared_before
        mapped = find_mapped(Path("/proc").glob("[0-9]*")) if names else set()
        files = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # its program has ended since
                inode = str((Path("/dev/shm") / name).stat().st_ino)
                if self._may_own(name, inode=inode) and inode not in mapped:
                    files.append(f"/dev/shm/{name}")
        return files

    def _may_own(self, name: str, *, inode: str) -> bool:
        """Return False for a file in shared memory of another program on the host."""
        if name.startswith("sem."):  # such as one that was killed a moment ago
            return inode in self.mapped
        folder = FOLDER_NAME.fullmatch(name)
        return folder is None or int(folder["process"]) in self.seen

    def files(self) -> list[str]:
        """Return files of ended runs in the temporary directory and in shared memory."""
        temporary_files = [
            str(path.relative_to(self.folder))
            for path in self.folder.glob("*")
            if path.name != f"ray-{os.getuid()}"
        ]
        sessions = (
            path
            for path in self.folder.glob("ray-*/r/*")
            if path.is_dir() and not path.is_symlink()
        )
        return sorted(
            [
                *temporary_files,
                *self.shared_files(),
                *(str(path.relative_to(self.folder)) for path in sessions),
            ]
        )


@pytest.fixture
def site() -> Iterator[Site]:
    # Short, because the names of Ray's sockets may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    (folder / "t").mkdir()
    made = Site(folder=folder / "t", shared_before=frozenset(os.listdir("/dev/shm")))
    yield made
    for entry in made.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(entry.split()[0]), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def has_step(run: Path, step: int) -> Callable[[], bool]:
    """Return a function that says whether a step was logged."""

    def reached() -> bool:
        file = run / "metrics.jsonl"
        return file.exists() and any(
            json.loads(line)["step"] >= step for line in file.read_text().splitlines()[:-1]
        )

    return reached


def test_only_own_files_that_no_living_process_maps_are_leftovers(site: Site) -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    site.mapped |= find_mapped([Path("/proc/self")])
    names = [f"psm_{site.token}", f"sem.mp-{site.token}", f"sem.mp-other-{site.token}"]
    folder = make_folder_path("test", root=Path("/dev/shm"))
    folder.mkdir()  # of a living process that is none of the site's
    memory, own, _ = files = [Path("/dev/shm") / name for name in names]
    try:
        for file in files:
            file.touch()
        site.mapped.add(str(own.stat().st_ino))
        assert site.files() == [str(memory), str(own)]
        site.seen[os.getpid()] = ""
        assert site.files() == [str(memory), str(own), str(folder)]
    finally:
        folder.rmdir()
        for file in files:
            file.unlink(missing_ok=True)
    assert semaphore.acquire(block=False)


@pytest.mark.parametrize("kind", ["", RAY, VLLM, RAY_AND_VLLM])
def test_killed_driver_leaves_no_process_and_the_next_start_removes_its_files(
    site: Site, tmp_path: Path, kind: str
) -> None:
    run = tmp_path / "run"
    driver = site.start(run, *overrides_of(kind), *ENDLESS)
    site.wait_for(driver, has_step(run, 2))
    driver.kill()
    driver.wait()
    site.check_processes()
    next_start = ON_RAY if "ray" in kind else ()
    another = tmp_path / "next"
    again = site.start(another, *next_start, *ENDLESS)
    # While the next run is on its way, everything there is must be its own.
    site.wait_for(again, has_step(another, 1))
    own = [name for name in site.files() if f"-{again.pid}-" in name or f"_{again.pid}" in name]
    others = [name for name in site.files() if name not in own]
    assert others == []
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=120) == 143, site.log[-5000:]
    site.check_processes()


@pytest.mark.ray
def test_driver_killed_while_it_starts_ray_leaves_nothing(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    driver = site.start(run, *overrides_of("ray"), *ENDLESS)
    site.wait_for(driver, lambda: bool(list(site.folder.glob("ray-*/r/session_2*"))))
    driver.kill()
    driver.wait()
    site.check_processes()
    site.finish(tmp_path / "next", *ON_RAY, "run.total_steps=1")
    assert [
        name for name in site.files() if f"_{driver.pid}" in name or f"-{driver.pid}-" in name
    ] == []


@pytest.mark.parametrize("kind", ["", RAY, VLLM, RAY_AND_VLLM])
def test_run_that_ends_leaves_no_process_and_no_file(site: Site, tmp_path: Path, kind: str) -> None:
    site.finish(tmp_path / "run", *overrides_of(kind), "run.total_steps=1")
    site.check_processes()
    # Ray's session folder has the logs of the run, and is removed by the next one.
    assert [name for name in site.files() if not RAY_LOGS.match(name)] == []


@pytest.mark.ray
def test_killed_ray_actor_ends_the_run_and_leaves_nothing(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    driver = site.start(run, *overrides_of("ray"), *ENDLESS)
    site.wait_for(driver, has_step(run, 1))
    actor = site.process("ray::RoleActor")
    assert actor
    os.kill(actor, signal.SIGKILL)
    assert driver.wait(timeout=300) == 1
    assert "died" in site.log
    assert "run.resume=auto" in site.log
    site.check_processes()
    assert [name for name in site.files() if not RAY_LOGS.match(name)] == []


@pytest.mark.ray
@pytest.mark.parametrize("moment", ["while Ray starts", "in a step"])
def test_sigterm_on_ray_ends_the_run_with_143_and_leaves_nothing(
    site: Site, tmp_path: Path, moment: str
) -> None:
    run = tmp_path / "run"
    driver = site.start(run, *overrides_of("ray"), *ENDLESS, "run.stop_grace_s=60")
    begun = (
        has_step(run, 1)
        if moment == "in a step"
        else lambda: bool(list(site.folder.glob("ray-*/r/session_2*")))
    )
    site.wait_for(driver, begun)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(timeout=90) == 143, site.log[-5000:]
    assert (
        "resume with: temper-train" if moment == "in a step" else "start again with: temper-train"
    ) in site.log
    site.check_processes()
    assert [name for name in site.files() if not RAY_LOGS.match(name)] == []


@pytest.mark.vllm
def test_server_killed_before_the_first_weights_is_restarted(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    driver = site.start(
        run,
        *overrides_of("vllm"),
        "run.total_steps=1",
        "reward.function=temper_trainer_test_rewards:share_of_digits",
    )
    site.wait_for(driver, lambda: "rollout replica 0 is ready after" in site.log)
    server = site.process("temper_trainer.rollout.vllm.server")
    assert server
    os.killpg(server, signal.SIGKILL)
    assert driver.wait(timeout=600) == 0, site.log[-5000:]
    assert "rollout replica 0 is restarted" in site.log
    site.check_processes()
    assert site.files() == []


def processes_of(group: int) -> list[int]:
    """Return the living processes of a process group."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(folder.name)) == group and start_time(int(folder.name)):
                members.append(int(folder.name))
    return members


@pytest.mark.vllm
@pytest.mark.parametrize("killed", ["leader", "leader and driver", "group and driver"])
def test_killed_tensor_parallel_server_leaves_no_worker_and_no_file(
    site: Site, tmp_path: Path, killed: str
) -> None:
    run = tmp_path / "run"
    settings = (*overrides_of("vllm"), "rollout.vllm.tensor_parallel_size=2", *ENDLESS)
    driver = site.start(run, *settings)
    site.wait_for(driver, has_step(run, 1))
    server = site.process("temper_trainer.rollout.vllm.server")
    assert len(processes_of(server)) >= 3  # the leader and two workers
    if "driver" in killed:
        driver.send_signal(signal.SIGSTOP)  # it must not notice the death of its server
    if killed == "group and driver":
        os.killpg(server, signal.SIGKILL)
    else:
        os.kill(server, signal.SIGKILL)
    begin = time.monotonic()
    while processes_of(server):
        assert time.monotonic() - begin < LIMIT_S, site.alive()
        time.sleep(0.1)
    if killed == "leader":
        # The next start is that of the new server.
        site.wait_for(driver, lambda: site.log.count("rollout replica 0 is ready after") == 2)
        own = [name for name in site.files() if f"-{driver.pid}-" in name]
        kinds = [name.split("-")[1] for name in own]
        assert kinds.count("server") == kinds.count("ipc") == 1  # those of the new server
        assert [name for name in site.files() if name not in own] == []
    driver.kill()
    driver.wait()
    site.check_processes()
    site.finish(tmp_path / "next", "run.total_steps=1")
    assert site.files() == []
