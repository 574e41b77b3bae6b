"""Find the file a command runs, and the old trainer that a Python file uses."""

import ast
import os
import re
import tomllib
import warnings
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from temper_legacy_shim.bash.execution.external_commands import (
    STARTERS,
    WRAPPERS,
    is_hidden,
    started,
)
from temper_legacy_shim.bash.values.shell_state import Event
from temper_legacy_shim.bash.values.shell_values import Field
from temper_legacy_shim.scripts.launches import find_program, starts_unknown_program
from temper_legacy_shim.scripts.script_reading import find_script, is_regular, read_bounded

_SCRIPT = re.compile(r"[^\s=]*\.(?:sh|bash|slurm|sbatch)")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh", "source", ".")
_SUBMITTERS = ("sbatch", "qsub", "bsub")
_PYTHON = re.compile(r"(?:.*/)?(?:python[0-9.]*|ipython3?)")
_READERS = ("pytest", "jupyter", "papermill", "ipython", "marimo", "streamlit")
"""Programs that run a Python file or notebook among their arguments."""
_RUNNERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("just", "task", "tox", "nox", "invoke", "inv", "fab", "snakemake"), ()),
    **dict.fromkeys(("condor_submit", "nextflow", "ansible-playbook", "cwltool"), ()),
    **dict.fromkeys(("npm", "yarn", "pnpm", "mlflow"), ("run",)),
    "wandb": ("agent", "launch"),
    "dvc": ("repro", "exp"),
    "sky": ("launch", "exec", "jobs", "job", "serve"),
    **dict.fromkeys(("kubectl", "oc"), ("apply", "create", "replace")),
    "nnictl": ("create",),
    "helm": ("install", "upgrade"),
    "argo": ("submit",),
    **dict.fromkeys(("docker", "podman"), ("compose",)),
    **dict.fromkeys(("docker-compose", "podman-compose"), ()),
    "az": ("ml",),
    "gcloud": ("ai",),
}
"""Programs that run commands of another file, with the words that make them do so."""
_JOB_FILES = (".yaml", ".yml", ".json", ".toml", ".py", ".sub", ".nf", ".smk", ".cwl")
"""Suffixes of files that describe commands, and not data."""
_MODAL_RUNS = (["run"], ["deploy"], ["serve"])
_OLD_TRAINER = re.compile(
    r"\b(?:verl|recipe)(?:\.\w+)*\.(?:main\w*|\w*trainer\w*|\w*main)\b(?!\.\w)"
)
_IMPORT = re.compile(r"\s*(?:from\s+(\.*[\w.]*)\s+import\s+([\w, ]+)|import\s+([\w., ]+))")
_MOST_MODULES = 40


def called_script(event: Event, folder: Path | None, within: tuple[str, ...]) -> str:
    """Return the shell script a command runs; empty for other commands."""
    fields = started(event.fields)
    if not fields:
        return ""
    first = fields[0].text.shown()
    name = first.rpartition("/")[2]
    if name in WRAPPERS and name not in _SUBMITTERS:
        words = (field.text.shown() for field in fields[1:])
        first = next((word for word in words if word.startswith(("./", "../"))), first)
    if _SCRIPT.fullmatch(first):
        return first
    if name in _SHELLS or name in _SUBMITTERS:
        given = next((name for field in fields[1:] if (name := _script_name(field))), "")
        return given or _operand(fields, folder, within) or event.input_file
    is_relative = first.startswith(("./", "../")) and not first.endswith(".py")
    return first if is_relative and not _PYTHON.fullmatch(first) else ""


def _operand(fields: list[Field], folder: Path | None, within: tuple[str, ...]) -> str:
    """Return the file among the arguments of a shell or scheduler, under any name."""
    words = [field.text.shown() for field in fields[1:]]
    operands = [word for word in words if not word.startswith("-") and "=" not in word]
    is_shell = fields[0].text.shown().rpartition("/")[2] in _SHELLS
    if is_shell and _gives_text(words):
        return ""
    files = (word for word in operands if find_script(word, folder, within))
    return next(files, operands[0] if operands and is_shell else "")


def _gives_text(words: list[str]) -> bool:
    """Check if a shell's options give it commands as an argument or on its standard input."""
    rest = iter(words)
    for word in rest:
        if not word.startswith(("-", "+")):
            break
        if re.fullmatch(r"-[a-zA-Z]*[cs][a-zA-Z]*", word):
            return True
        if re.fullmatch(r"[-+][a-zA-Z]*[oO]|--rcfile|--init-file", word):
            next(rest, "")
    return False


def _script_name(field: Field) -> str:
    """Return a script's path without a substitution's output; empty for another argument."""
    pieces = field.text.pieces
    while pieces and not pieces[-1].is_known:  # a variable: what it was assigned
        pieces = () if pieces[-1].inner == pieces else pieces[-1].inner
    known = pieces[-1].value if pieces else ""
    shown = field.text.shown()
    return (
        shown
        if _SCRIPT.fullmatch(shown)
        else f"...{known}"
        if known != shown and _SCRIPT.fullmatch(known)
        else ""
    )


def called_program(event: Event, folder: Path | None) -> str:
    """Return the Python file, or the file of a module, that a command runs; empty for others."""
    fields = started(event.fields)
    words = [field.text.shown() for field in fields]
    if modal := modal_file(event):
        return modal
    if program := find_program(event.fields):
        main = program.removesuffix(".py") + "/__main__.py"
        is_package = find_script(program, folder) is None and find_script(main, folder) is not None
        return main if is_package else program
    if not words:
        return ""
    name = words[0].rpartition("/")[2]
    if _PYTHON.fullmatch(words[0]) and reads_stdin(event):
        return event.input_file
    if name in _READERS:
        return next((word for word in words[1:] if word.endswith((".py", ".ipynb"))), "")
    if name in _RUNNERS:
        files = (word for word in words[1:] if word.endswith(_JOB_FILES))
        return next((word for word in files if find_script(word, folder)), "")
    return _console_script(words, folder)


def reads_stdin(event: Event) -> bool:
    """Check if Python has no program but its standard input."""
    words = [field.text.shown() for field in started(event.fields)]
    if not words or not _PYTHON.fullmatch(words[0]):
        return False
    first = next((word for word in words[1:] if word not in ("-u", "-B", "-E", "-s")), "-")
    return first == "-"


def _console_script(words: list[str], folder: Path | None) -> str:
    """Return the file behind a command that the project's pyproject.toml defines."""
    is_run = words[0] in ("uv", "poetry", "pdm", "hatch", "pixi", "rye") and "run" in words[1:]
    path = find_script("pyproject.toml", folder)
    if path is None:
        return ""
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError:
        return ""
    scripts = _console_scripts(path, changed_ns)
    # Options of a runner may have values: uv run --extra gpu train.
    candidates = words[words.index("run") + 1 :] if is_run else words[:1]
    name = next((word for word in candidates if word in scripts), None)
    module = scripts[name].partition(":")[0].replace(".", "/") if name else ""
    ends = (".py", "/__init__.py") if module else ()
    files = (f"{base}{module}{end}" for base in ("", "src/") for end in ends)
    return next((each for each in files if is_regular(path.parent / each)), "")


@lru_cache(maxsize=64)
def _console_scripts(path: Path, changed_ns: int) -> dict[str, str]:
    """Return the commands that a pyproject.toml defines; ``changed_ns`` tells its versions."""
    try:
        project = tomllib.loads(read_bounded(path) or "")
    except ValueError:
        return {}
    scripts: dict[object, object] = {}
    for keys in (("tool", "poetry", "scripts"), ("project", "scripts")):
        table: object = project
        for key in keys:
            table = table.get(key) if isinstance(table, dict) else None
        scripts |= table if isinstance(table, dict) else {}
    return {str(name): str(target) for name, target in scripts.items()}


def modal_file(event: Event) -> str:
    """Return the Python file that ``modal run`` or ``modal deploy`` gets; empty for others."""
    words = [field.text.shown() for field in started(event.fields)]
    if words[1:3] == ["-m", "modal"]:
        words = words[2:]
    if not words or words[0].rpartition("/")[2] != "modal" or words[1:2] not in _MODAL_RUNS:
        return ""
    for before, word in pairwise(words[1:]):
        name = word.partition("::")[0]
        if before == "-m":
            return name.replace(".", "/") + ".py"
        if name.endswith(".py"):
            return name
    return ""


def runs_other_text(event: Event) -> bool:
    """Check for programs whose commands are in another file, or known only in a run."""
    fields = started(event.fields)
    words = [field.text.shown() for field in fields] or [""]
    name = words[0].rpartition("/")[2]
    if name in _RUNNERS:
        return not _RUNNERS[name] or any(word in _RUNNERS[name] for word in words[1:2])
    if name in ("find", "parallel"):
        return any(STARTERS.fullmatch(word) for word in words[1:])
    if reads_stdin(event):
        return event.stdin is not None and is_hidden(event.stdin)
    return starts_unknown_program(event.fields)


def trainer_in_text(text: str) -> str:
    """Return the old trainer that Python code or a description of a job names, or empty."""
    # Parts of an import that stand apart: from verl.trainer import main_ppo.
    joined = re.sub(r"\bfrom\s+((?:verl|recipe)[\w.]*)\s+import\s+\(?\s*(?=\w)", r"\1.", text)
    code = (line.partition("#")[0] for each in (text, joined) for line in each.splitlines())
    return next((match[0] for line in code if (match := _OLD_TRAINER.search(line))), "")


def trainer_in(path: Path) -> tuple[str, bool]:
    """Return the old trainer that a file, or a module it imports, names; empty if none is.

    The second value is False if there are too many modules to read all of them.
    """
    waiting, seen = [path], {os.path.realpath(path)}
    for _ in range(_MOST_MODULES):
        if not waiting:
            break
        current = waiting.pop(0)
        if (text := read_bounded(current)) is None:
            continue
        if trainer := trainer_in_text(text):
            return trainer, True
        if current.suffix == ".py":
            modules = [
                each for each in _imported(text, current) if os.path.realpath(each) not in seen
            ]
            seen |= {os.path.realpath(each) for each in modules}
            waiting += modules
    return "", not waiting


def _imported_names(text: str) -> list[str]:
    """Return the modules that Python code imports, and names that may be modules."""
    try:
        with warnings.catch_warnings():
            # Odd escapes in strings of the old code are not this reader's concern.
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Such as Python 2, templates and notebooks: imports of one line are enough there.
        matches = list(filter(None, map(_IMPORT.match, text.splitlines())))
        imports = [(match[1], re.split(r"[\s,]+", match[2] or match[3])) for match in matches]
    else:
        imports = [
            ("." * node.level + (node.module or ""), [alias.name for alias in node.names])
            for node in nodes
            if isinstance(node, ast.ImportFrom)
        ]
        imports += [
            (None, [alias.name for alias in node.names])
            for node in nodes
            if isinstance(node, ast.Import)
        ]
    out = list[str]()
    for module, names in imports:
        start = module if module is None or module.endswith(".") else f"{module}."
        out += [] if module is None else [module]
        out += [f"{start or ''}{name}" for name in names if name]
    return out


def _imported(text: str, path: Path) -> Iterator[Path]:
    """Yield the files next to a module, or around it, that it imports."""
    for name in _imported_names(text):
        dots = len(name) - len(name.lstrip("."))
        parts = name.strip(".").split(".")
        # The old package itself is known, wherever a copy of it is.
        if not dots and parts[0] in ("verl", "recipe"):
            continue
        bases = [path.parent, *path.parent.parents[:3]]
        for base in bases[dots - 1 : dots] if dots else bases:
            files = (
                base.joinpath(*parts[:-1], f"{parts[-1]}.py"),
                base.joinpath(*parts, "__init__.py"),
            )
            result = next((each for each in files if is_regular(each)), None)
            if result is not None:
                yield result
                break
