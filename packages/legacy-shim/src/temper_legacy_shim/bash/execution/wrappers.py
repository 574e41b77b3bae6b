"""Commands that start another command: ``srun``, ``nohup``, ``ray job submit ...

--``, ``bash -c``, and the commands that they start.
"""

import re

from temper_legacy_shim.bash.values.shell_values import Field, Text

_WRAPPERS = frozenset(
    (
        *(
            "nohup",
            "env",
            "sudo",
            "timeout",
            "time",
            "stdbuf",
            "numactl",
            "taskset",
            "nice",
            "ionice",
            "setsid",
            "unbuffer",
            "xargs",
            "flock",
        ),
        *(
            "srun",
            "sbatch",
            "salloc",
            "bsub",
            "qsub",
            "oarsh",
            "mpirun",
            "mpiexec",
            "ray",
            "torchx",
            "sky",
            "modal",
            "kubectl",
            "dlrover-run",
        ),
        *(
            "docker",
            "podman",
            "singularity",
            "apptainer",
            "enroot",
            "conda",
            "mamba",
            "micromamba",
            "uv",
            "poetry",
            "pipenv",
            "ssh",
            "pdsh",
        ),
        *(
            "tmux",
            "screen",
            "script",
            "systemd-run",
            "chrt",
            "watch",
            "strace",
            "perf",
            "nsys",
            "ncu",
            "rocprof",
            "py-spy",
            "viztracer",
        ),
    )
)
STARTERS = re.compile(r"(?:.*/)?(?:python[0-9.]*|torchrun|accelerate|deepspeed|bash|sh|zsh|dash)")
_SHELLS = re.compile(r"(?:.*/)?(?:bash|sh|zsh|dash)")


def started(fields: tuple[Field, ...] | list[Field]) -> list[Field]:
    """Return the innermost command that is not a wrapper.

    The command itself if it is none, or starts nothing that is known.
    """
    fields = list(fields)
    for _ in range(8):
        name = (fields[0].text.known or "").rpartition("/")[2] if fields else ""
        if name not in _WRAPPERS:
            return fields
        position = next(
            (
                at
                for at, field in enumerate(fields)
                if at and (_may_start(field) or (name == "uv" and _is_module(field)))
            ),
            None,
        )
        if position is None:
            return fields
        fields = fields[position:]
    return fields


def _may_start(field: Field) -> bool:
    known = field.text.known
    if known is not None:
        return STARTERS.fullmatch(known) is not None or known in _WRAPPERS
    # ${PYTHON}, $CONDA_PREFIX/bin/python: the end shows that it is Python.
    shown = field.text.shown()
    return (
        "=" not in shown
        and re.search(r"(?:/|\$\{?PYTHON\w*\}?)(?:python[0-9.]*|torchrun)?$", shown) is not None
    )


def _is_module(field: Field) -> bool:
    """Check for ``-m MODULE`` or ``FILE.py`` of ``uv run``, without the name of Python."""
    known = field.text.known or ""
    return known in ("-m", "--module") or known.endswith(".py")


SUBMITTERS = frozenset(("tee", "sbatch", "qsub", "bsub", "kubectl"))
"""Programs that pass their standard input on to something that runs it, or to a file."""


def inner_script(fields: list[Field], stdin: Text | None) -> Text | None:
    """Return the text that a command runs as a script.

    It is the argument of ``bash -c``, a heredoc to ``bash`` or ``ssh``, or a quoted remote command.
    """
    command = started(fields)
    name = (fields[0].text.known or "").rpartition("/")[2]
    first = command[0].text.known or "" if command else ""
    if _SHELLS.fullmatch(first):
        for at, field in enumerate(command[1:], 1):
            option = field.text.known or ""
            if re.fullmatch(r"-[a-z]*c", option):
                return command[at + 1].text if at + 1 < len(command) else None
            if not option.startswith("-"):
                return None
        return stdin
    if (
        name in ("ssh", "pdsh", "tmux", "screen", "sbatch", "srun", "docker")
        and command is not None
    ):
        last = fields[-1].text.shown()
        if (
            " " in last
            and re.search(r"\b(python[0-9.]*|torchrun)\s", last)
            and command[0] is fields[0]
        ):
            return fields[-1].text.after("--wrap=") or fields[-1].text
        if name == "ssh" and stdin is not None:
            return stdin
    return None
