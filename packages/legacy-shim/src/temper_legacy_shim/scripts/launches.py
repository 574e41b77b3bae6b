"""Find the commands of a script that start an old trainer: entry, config and overrides."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from temper_legacy_shim.bash.execution.external_commands import started
from temper_legacy_shim.bash.syntax.syntax_tree import Span
from temper_legacy_shim.bash.values.shell_state import Event
from temper_legacy_shim.bash.values.shell_values import Field, Text
from temper_legacy_shim.configs.reading.trees import known_keys

_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
_TORCHRUN = re.compile(r"(?:.*/)?(?:torchrun|accelerate|deepspeed)")
_RUN_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)
_OVERRIDE = re.compile(r"(?:\+\+?|~)?[A-Za-z_][\w/@.-]*=")
OLD_MODULE = re.compile(r"(?:verl|recipe)(?:\.\w+)*\.(?:main\w*|\w*trainer\w*|\w*main)")
_FLAGS = frozenset(
    (
        "--standalone",
        "--no-python",
        "--no_python",
        "--multi_gpu",
        "--multi-gpu",
        "--use_deepspeed",
        "--use_fsdp",
        "--cpu",
        "--quiet",
    )
)
_HYDRA_VALUES = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-dir": "config_dir",
    "-cd": "config_dir",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    text: Text
    """``key=value`` as the trainer gets it."""
    source: str
    at: int
    """Position in the script; -1 if the text is not a single word there."""
    key: str
    """Key with ``+`` or ``~``; empty for arguments that are no override, such as ``"$@"``."""

    def value(self) -> Text:
        """Return the text after ``key=``."""
        return self.text.after(self.key + "=") or Text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts an old trainer."""

    entry: str
    config_name: str | None
    config_path: str | None
    overrides: tuple[Override, ...]
    """Overrides in the trainer's order."""
    open_arguments: tuple[Override, ...]
    """Arguments known only at run time, such as ``"$@"``."""
    processes: dict[str, Text]
    """``nproc_per_node`` and ``nnodes``, where a launcher says them."""
    command: tuple[Field, ...]
    """All arguments, wrappers included."""
    environment: tuple[tuple[str, Text], ...]
    starter: int
    """Index in `command` of the program that starts Python, after all wrappers."""
    span: Span
    """The command, with assignments before it and redirections."""
    arguments: Span
    item: Span
    is_inner: bool
    """Inside ``bash -c``, ``eval``, a heredoc or a sourced file."""
    sourced_file: str
    """Sourced file with the command; empty for the script itself."""


def find_launches(events: list[Event], *, is_written: bool = False) -> list[Launch]:
    """Return the old trainers among commands, in the order in which they would start.

    Args:
        events: Commands of a script.
        is_written: Examine only texts the script writes to files.
    """
    launches = (_launch(event) for event in events if event.is_written == is_written)
    return [launch for launch in launches if launch is not None]


def _launch(event: Event) -> Launch | None:
    """Return the old trainer that a command starts, or None.

    Hydra's own options describe the launch, and words with a key or a known text are overrides.
    Other words stay open: the shell may expand them to any override.
    """
    command = started(event.fields)
    position = _entry(command)
    if position is None:
        return None
    entry, at, processes = position
    config: dict[str, str] = {}
    overrides: list[Override] = []
    open_arguments: list[Override] = []
    rest = command[at:]
    while rest:
        field, rest = rest[0], rest[1:]
        shown = field.text.shown()
        option, separator, value = shown.partition("=")
        if option in _HYDRA_VALUES:
            if separator:
                config[_HYDRA_VALUES[option]] = value
            elif rest:
                config[_HYDRA_VALUES[option]] = rest[0].text.shown()
                rest = rest[1:]
            continue
        match = _OVERRIDE.match(_known_start(field.text))
        key = match[0][:-1] if match else ""
        result = Override(text=field.text, source=field.source, at=field.at, key=key)
        (overrides if key or (field.text.is_known and shown) else open_arguments).append(result)
    wrapped = next(
        (
            override
            for override in overrides
            if not override.key and OLD_MODULE.fullmatch(override.text.shown())
        ),
        None,
    )
    if wrapped is not None and not OLD_MODULE.fullmatch(
        entry
    ):  # a launcher of another package: python -m package.launch MODULE ...
        entry = wrapped.text.shown()
        overrides.remove(wrapped)
    if not _is_old(entry, overrides, config):
        return None
    return Launch(
        entry=entry,
        config_name=config.get("config_name"),
        config_path=config.get("config_path") or config.get("config_dir"),
        overrides=tuple(overrides),
        open_arguments=tuple(open_arguments),
        processes=processes,
        command=event.fields,
        environment=event.environment,
        starter=len(event.fields) - len(command),
        span=event.span,
        arguments=event.arguments,
        item=event.item,
        is_inner=event.is_inner,
        sourced_file=event.sourced_file,
    )


def _known_start(text: Text) -> str:
    """Return the known characters before the first unknown one."""
    out = []
    for piece in text.pieces:
        if not piece.is_known:
            break
        out.append(piece.value)
    return "".join(out)


def _is_old(entry: str, overrides: list[Override], config: dict[str, str]) -> bool:
    if OLD_MODULE.fullmatch(entry):
        return True
    # One known key may be a coincidence (`model.path`); two in one command are a trainer of verl or
    # of a fork.
    num_known = sum(
        override.key.lstrip("+~") in known_keys() for override in overrides if "." in override.key
    )
    return num_known >= 2 or (bool(config) and num_known >= 1)


def _entry(command: list[Field]) -> tuple[str, int, dict[str, Text]] | None:
    """Find Python's module or file, the start of its arguments, and the process counts."""
    first = _name(command[0]) if command else ""
    if _TORCHRUN.fullmatch(first):
        return _launcher_entry(
            command, 2 if first.endswith("accelerate") and _name_at(command, 1) == "launch" else 1
        )
    if first in ("-m", "--module") and len(command) > 1:  # of uv run
        return command[1].text.shown(), 2, {}
    if first.endswith(".py"):
        return first, 1, {}
    if not _PYTHON.fullmatch(first) and not (
        _name_at(command, 1) == "-m" and OLD_MODULE.fullmatch(_name_at(command, 2))
    ):
        return None  # "$MY_ENV/bin/x" -m verl.trainer.main_ppo is Python under any name
    at = 1
    while at < len(command):
        word = _name_at(command, at)
        if word == "-m" and at + 1 < len(command):
            module = command[at + 1].text.shown()
            if module in _RUN_MODULES:
                return _launcher_entry(command, at + 2)
            return module, at + 2, {}
        # Code of -c is no module, and a word without text is a variable that may hold options.
        if word == "-c" or not word:
            return None
        if word in ("-W", "-X"):
            at += 2
        elif word.startswith("-"):
            at += 1
        else:
            return (word, at + 1, {}) if "=" not in word else None
    return None


def starts_unknown_program(fields: Sequence[Field]) -> bool:
    """Check if Python starts a module or file whose name only a run knows."""
    position = _entry(started(list(fields)))
    return position is not None and re.search(r"[$`]", position[0]) is not None


def find_program(fields: Sequence[Field]) -> str:
    """Return the path of the Python file or module a command runs; empty for others."""
    position = _entry(started(list(fields)))
    if position is None:
        return ""
    name = position[0]
    return name if name.endswith(".py") else name.replace(".", "/") + ".py"


def takes_arguments_from_stdin(launch: Launch) -> bool:
    """Check if xargs adds arguments to the command."""
    names = (field.text.known or "" for field in launch.command[: launch.starter])
    return any(name.rpartition("/")[2] == "xargs" for name in names)


def _launcher_entry(command: list[Field], at: int) -> tuple[str, int, dict[str, Text]] | None:
    """Return the program of a launcher such as torchrun, the index after it, and the options.

    The options may have the number of processes.
    """
    processes: dict[str, Text] = {}
    while at < len(command):
        text = command[at].text
        word = text.shown()
        if word in (
            "-m",
            "--module",
        ):  # a switch: options may follow it, and the first other word is the module
            at += 1
            continue
        if not word.startswith("-"):
            return word, at + 1, processes
        option, separator, _ = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        if separator:
            processes[name] = text.after(option + "=") or Text()
            at += 1
        elif (
            option in _FLAGS or at + 1 >= len(command) or _name_at(command, at + 1).startswith("-")
        ):
            at += 1
        else:
            processes[name] = command[at + 1].text
            at += 2
    return None


def _name(field: Field) -> str:
    """Return the program; of ``$ENV/bin/python`` the known end."""
    known = field.text.known
    if known is not None:
        return known
    last = field.text.pieces[-1]
    if last.is_known:
        return last.value.rpartition("/")[2]
    return "python" if "PYTHON" in last.value.upper() else ""


def _name_at(command: list[Field], at: int) -> str:
    return command[at].text.shown() if at < len(command) else ""


_STARTS = re.compile(
    r"^[^#\n]*\b(?:python[0-9.]*|torchrun|accelerate|deepspeed|bash|srun)\b", re.MULTILINE
)
_MODULE = re.compile(r"\s-m\s+(?:-\S+\s+)*[\w.]*\b(?:main_\w+|\w*sft_trainer|fully_async_main)\b")
_KEYS = re.compile(r"(?:^|[\s\"'+])([A-Za-z_]\w*(?:\.\w+)+)=", re.MULTILINE)


def is_launch_text(text: str) -> bool:
    """Return True for the text of a script whose lines start an old trainer."""
    is_launch = (
        _MODULE.search(text) is not None
        or sum(key in known_keys() for key in _KEYS.findall(text)) >= 2
    )
    return is_launch and _STARTS.search(text) is not None


def explain_npu_probe(fields: Sequence[Field]) -> str | None:
    """Return a note if a command only checks for NPUs, such as ``which npu-smi``."""
    words = [field.text.shown() for field in fields]
    is_asking = "-c" in words or words[0] in ("which", "command", "type")
    names_npu = len(words) <= 4 and re.search(r"\btorch_npu\b|\bnpu-smi\b", words[-1]) is not None
    if words[0].rpartition("/")[2] == "npu-smi" or (is_asking and names_npu):
        return (
            f"{fields[0].source} ... torch_npu or npu-smi is taken to fail: GPUs are assumed; "
            "NPUs have no counterpart here"
        )
    return None
