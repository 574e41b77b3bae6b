"""Launches of bash itself.

A script run in an empty folder where every external command is a stub that records its arguments.

Nothing of the script's own commands runs: ``PATH`` holds a few filters and bash; the network is cut
off, and root's rights are given up, where this machine allows it.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILTERS = (
    "basename",
    "dirname",
    "tr",
    "cut",
    "seq",
    "sed",
    "expr",
    "head",
    "tail",
    "wc",
    "rev",
    "cat",
    "bash",
    "sh",
)
NO_ONE = "65534"
# Stubs that end pipes drain them, so that what writes to them is not killed; `srun bash -c ...`
# runs that bash; folders and limits of this machine are no matter of the script.
_STUBS = """
command_not_found_handle() {
    case "$*" in *"-c import torch_npu"*|npu-smi*) return 1 ;; esac
    printf '%s\\0' "$#" "$@" >> "$STUB_RECORD"
    case "$1" in tee|grep|awk|sort) cat > /dev/null ;; esac
    while [ "$#" -gt 1 ]; do
        shift
        if [ "$1" = bash ]; then "$@"; return; fi
    done
    return 0
}
exec() { if [ "$#" -gt 0 ]; then "$@"; exit; fi; }
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
    process_id: int
    """Value of ``$$`` in the script."""


def run_in_bash(
    text: str, *, environment: dict[str, str], arguments: list[str], limit_s: float = 20
) -> Run:
    """Run a script with stubs; see above."""
    with tempfile.TemporaryDirectory(prefix="stubs-", ignore_cleanup_errors=True) as name:
        # Open to whoever runs the script, unlike pytest's own folders.
        return _run(text, Path(name), environment=environment, arguments=arguments, limit_s=limit_s)


def _run(
    text: str, folder: Path, *, environment: dict[str, str], arguments: list[str], limit_s: float
) -> Run:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in FILTERS:
        result = shutil.which(name)
        if result is not None and not (programs / name).exists():
            (programs / name).symlink_to(os.path.realpath(result))
    work, record = folder / "work", folder / "record"
    work.mkdir(exist_ok=True)
    record.write_bytes(b"")
    (folder / "stubs").write_text(_STUBS)
    (folder / "script.sh").write_text(text, errors="surrogateescape")
    for path in (folder, work, record):
        path.chmod(0o777 if path.is_dir() else 0o666)
    given = {
        **environment,
        "PATH": str(programs),
        "STUB_RECORD": str(record),
        "BASH_ENV": str(folder / "stubs"),
        "LC_ALL": "C.UTF-8",
    }
    command = [*_confined(), str(programs / "bash"), str(folder / "script.sh"), *arguments]
    was_stopped = False
    process = subprocess.Popen(
        command,
        cwd=work,
        env=given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        was_stopped = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    commands = _recorded(record.read_bytes().decode(errors="surrogateescape"))
    # `unshare` and `setpriv` replace themselves by bash, so bash has the number of the process.
    return Run(commands, was_stopped, process.pid)


def is_bash(text: str) -> bool:
    """Return False if bash refuses the syntax of a script."""
    bash = shutil.which("bash")
    assert bash is not None
    script = text.encode(errors="surrogateescape")
    return (
        subprocess.run([bash, "-n"], input=script, capture_output=True, check=False).returncode == 0
    )


@cache
def _confined() -> tuple[str, ...]:
    """Return a command that removes the network and root's rights if the machine has one."""
    prefix: tuple[str, ...] = ()
    for each in (
        ("unshare", "--net"),
        ("setpriv", f"--reuid={NO_ONE}", f"--regid={NO_ONE}", "--clear-groups"),
    ):
        if (
            shutil.which(each[0])
            and subprocess.run(
                [*prefix, *each, "true"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            prefix = (*prefix, *each)
    return tuple(
        shutil.which(word) or word if word in ("unshare", "setpriv") else word for word in prefix
    )


def _recorded(content: str) -> list[list[str]]:
    words = content.split("\0")[:-1]
    out, at = [], 0
    while at < len(words):
        count = int(words[at])
        out.append(words[at + 1 : at + 1 + count])
        at += 1 + count
    return out
