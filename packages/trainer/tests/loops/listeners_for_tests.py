"""Compare the listening TCP sockets of a run with the table in SECURITY.md (Linux only)."""

import os
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

LISTENS = "0A"
SECURITY = Path(__file__).parents[4] / "SECURITY.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table of listeners."""

    process: str
    """Begin of the name by which a process is told."""
    most: int
    """Sockets in one such process."""
    is_on_loopback: bool
    """Else on every address."""


def rows(*, run: str) -> list[Row]:
    """Return the rows of the table in SECURITY.md for one kind of run."""
    lines = (
        SECURITY.read_text()
        .split("<!-- listeners -->")[1]
        .split("<!-- end of listeners -->")[0]
        .strip()
        .splitlines()
    )
    names, _, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table = [dict(zip(names, row, strict=True)) for row in cells]
    is_on_loopback = {"loopback": True, "all": False}
    return [
        Row(
            process=row["process"].strip("`"),
            most=int(row["sockets"]),
            is_on_loopback=is_on_loopback[row["one machine"]],
        )
        for row in table
        if run in row["runs"].split(", ")
    ]


class Listeners:
    """Notes, while it is open, every listening socket that was not there before."""

    def __init__(self) -> None:
        self._before = {inode for _, inode, _ in _listening()}
        self._seen: dict[str, tuple[int, str, str]] = {}
        self.commands: set[bytes] = set()
        """Observed command lines of this process tree."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Listeners":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def check(self, expected: list[Row]) -> None:
        """Check that the observed sockets are the expected ones, at most as many as listed."""
        num_sockets = Counter(
            (process_id, name, socket.inet_aton(address)[0] == 127)
            for process_id, name, address in self._seen.values()
        )
        for (_, name, is_on_loopback), count in num_sockets.items():
            listed = sum(
                row.most
                for row in expected
                if name.startswith(row.process) and row.is_on_loopback == is_on_loopback
            )
            assert count <= listed, (
                f"{name} has {count} sockets (loopback: {is_on_loopback}), SECURITY.md lists "
                f"{listed}: {self._seen}"
            )
        for row in expected:
            is_met = any(
                name.startswith(row.process) and is_on_loopback == row.is_on_loopback
                for _, name, is_on_loopback in num_sockets
            )
            assert is_met, f"SECURITY.md lists {row}, which no process opened: {self._seen}"

    def check_secret(self, secret: str, *, folder: Path) -> None:
        """Check that a secret is in no command line of a process and in no file below a folder."""
        assert self.commands
        assert not [command for command in self.commands if secret.encode() in command]
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if secret.encode() in path.read_bytes()]

    def wait_for(self, listening: socket.socket) -> bool:
        """Return True if a socket of this process is observed within seconds."""
        inode = str(os.fstat(listening.fileno()).st_ino)
        deadline = time.monotonic() + 20
        while inode not in self._seen and time.monotonic() < deadline:
            time.sleep(0.05)
        return inode in self._seen

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.commands |= {_command(process_id) for process_id in _tree()}
            for address, inode, process_id in _listening():
                if (
                    inode not in self._before
                    and inode not in self._seen
                    and (name := _name_of(process_id))
                ):
                    self._seen[inode] = (process_id, name, address)
            time.sleep(0.05)


def _listening() -> list[tuple[str, str, int]]:
    """List (address, inode, process) of listening TCP sockets of this process tree."""
    listening = []
    for process_id in _tree():
        for number in _entries(f"/proc/{process_id}/fd"):
            target = _link(f"/proc/{process_id}/fd/{number}")
            if target.startswith("socket:["):
                listening.append((target[8:-1], process_id))
    addresses = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                addresses[fields[9]] = _address(fields[1].split(":")[0])
    return [
        (addresses[inode], inode, process_id)
        for inode, process_id in listening
        if inode in addresses
    ]


def _address(words: str) -> str:
    """Format an address as IPv4; of IPv6 the last word, enough for mapped addresses."""
    return socket.inet_ntoa(struct.pack("<I", int(words[-8:], 16)))


def _tree() -> list[int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(
                Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
            )
        except (OSError, IndexError):
            continue  # it has just ended
    process_ids, grown = {os.getpid()}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in process_ids} - process_ids
        process_ids, grown = process_ids | more, bool(more)
    return sorted(process_ids)


def _name_of(process_id: int) -> str:
    """Return "driver", the name of a server, or the command without its folder."""
    if process_id == os.getpid():
        return "driver"
    words = _command(process_id).decode(errors="replace").replace("\0", " ").split()
    if "temper_trainer.rollout.vllm.server" in words:
        return "vLLM server"
    named = [word for word in words if not word.startswith("-") and "python" not in Path(word).name]
    return Path(named[0]).name if named else ""


def _command(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""  # it has just ended


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
