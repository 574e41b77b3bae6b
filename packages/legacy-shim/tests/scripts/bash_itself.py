"""What bash itself would launch: a script run in an empty folder where every external command is a stub that records its arguments.

Nothing of the script's own commands runs: ``PATH`` holds a few filters and bash; the network is cut off, and root's rights are given up,
where this machine allows it.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILTERS = ("basename", "dirname", "tr", "cut", "seq", "sed", "expr", "head", "tail", "wc", "rev", "cat", "bash", "sh")
NOBODY = "65534"
# A stub drains its pipe, so that what writes to it is not killed; folders and limits of this machine are no matter of the script.
_STUBS = """
command_not_found_handle() {
    printf '%s\\0' "$#" "$@" >> "$STUB_RECORD"
    if [ -p /dev/stdin ]; then cat > /dev/null; fi
    return 0
}
ulimit() { :; }
cd() { :; }
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of bash."""

    commands: list[list[str]]
    """Each external command with its arguments, in the order in which they started."""
    was_stopped: bool
    """It took too long."""


def run_in_bash(text: str, folder: Path, *, environment: dict[str, str], arguments: list[str], limit_s: float = 10) -> Run:
    """Run a script with stubs; see above."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in FILTERS:
        found = shutil.which(name)
        if found is not None and not (programs / name).exists():
            (programs / name).symlink_to(os.path.realpath(found))
    work, record = folder / "work", folder / "record"
    work.mkdir(exist_ok=True)
    record.write_bytes(b"")
    (folder / "stubs").write_text(_STUBS)
    (folder / "script.sh").write_text(text, errors="surrogateescape")
    for path in (folder, work, record):
        path.chmod(0o777 if path.is_dir() else 0o666)
    given = {**environment, "PATH": str(programs), "STUB_RECORD": str(record), "BASH_ENV": str(folder / "stubs"), "LC_ALL": "C.UTF-8"}
    command = [*_confined(), str(programs / "bash"), str(folder / "script.sh"), *arguments]
    was_stopped = False
    process = subprocess.Popen(
        command, cwd=work, env=given, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        was_stopped = True
    finally:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
        process.wait()
    return Run(_recorded(record.read_bytes().decode(errors="surrogateescape")), was_stopped)


@cache
def _confined() -> tuple[str, ...]:
    """What takes away the network and root's rights, where this machine has it."""
    prefix: tuple[str, ...] = ()
    for each in (("unshare", "--net"), ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")):
        if shutil.which(each[0]) and subprocess.run([*prefix, *each, "true"], capture_output=True).returncode == 0:
            prefix = (*prefix, *each)
    return tuple(shutil.which(word) or word if word in ("unshare", "setpriv") else word for word in prefix)


def _recorded(content: str) -> list[list[str]]:
    words = content.split("\0")[:-1]
    out, at = [], 0
    while at < len(words):
        count = int(words[at])
        out.append(words[at + 1 : at + 1 + count])
        at += 1 + count
    return out
