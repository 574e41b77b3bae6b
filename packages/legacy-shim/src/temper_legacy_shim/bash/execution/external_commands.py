"""Compute the output of external commands, and find what wrappers such as ``srun`` start."""

import re
from collections.abc import Callable

from temper_legacy_shim.bash.values.shell_values import Field, Text, literal

_MAX_LINES = 5_000


def output(fields: list[Field], stdin: Text | None) -> Text | None:
    """Return the output of a command; None if it is not one whose output is computed."""
    name = fields[0].text.known
    if name is None:
        return None
    if name == "cat" and len(fields) == 1 and stdin is not None and not is_hidden(stdin):
        return stdin
    filtering = _FILTERS.get(name.removeprefix("/usr").removeprefix("/bin/"))
    if filtering is None or not all(field.text.is_known for field in fields):
        return None
    arguments = [field.text.shown() for field in fields[1:]]
    known = None if stdin is None or is_hidden(stdin) else stdin.known
    printed = filtering(arguments, known)
    return None if printed is None else literal(printed)


def is_hidden(text: Text) -> bool:
    """Check if a part of an output or input is unknown and has no source text."""
    return any(piece.value == "\0" for piece in text.pieces)


def _basename(arguments: list[str], _: str | None) -> str | None:
    suffix = ""
    if arguments[:1] == ["-s"] and len(arguments) == 3:
        suffix, arguments = arguments[1], arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-"):
        return None
    name = arguments[0].rstrip("/").rpartition("/")[2] or ("/" if arguments[0] else "")
    suffix = arguments[1] if len(arguments) == 2 else suffix
    return (name.removesuffix(suffix) if name != suffix else name) + "\n"


def _dirname(arguments: list[str], _: str | None) -> str | None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        return None
    path = arguments[0].rstrip("/")
    if not path:
        return "/\n" if arguments[0] else ".\n"
    if "/" not in path:
        return ".\n"
    return (path.rpartition("/")[0].rstrip("/") or "/") + "\n"


def _seq(arguments: list[str], _: str | None) -> str | None:
    separator = "\n"
    if arguments[:1] == ["-s"] and len(arguments) > 2:
        separator, arguments = arguments[1], arguments[2:]
    if not 1 <= len(arguments) <= 3 or not all(
        re.fullmatch(r"-?\d{1,9}", each) for each in arguments
    ):
        return None
    numbers = [int(each) for each in arguments]
    first, step, last = (
        (1, 1, numbers[0])
        if len(numbers) == 1
        else (numbers[0], 1, numbers[1])
        if len(numbers) == 2
        else tuple(numbers)
    )
    if step == 0 or abs(last - first) // abs(step) > _MAX_LINES:
        return None
    values = range(first, last + (1 if step > 0 else -1), step)
    return separator.join(map(str, values)) + "\n" if len(values) else ""


def _tr(arguments: list[str], stdin: str | None) -> str | None:
    """Run ``tr`` for sets of characters; None if the output cannot be known."""
    if stdin is None or not arguments:
        return None
    deletes = arguments[0] == "-d"
    squeezes = arguments[0] == "-s"
    if deletes or squeezes:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-") or len(arguments) > 2:
        return None
    sets = [_tr_set(each) for each in arguments]
    first = sets[0]
    if first is None or any(each is None for each in sets):
        return None
    if deletes:
        return "".join(char for char in stdin if char not in first)
    second = (sets[1] if len(sets) == 2 else None) or ""
    if not squeezes and second:
        # tr repeats the last character of a shorter second set.
        padded = second + second[-1] * max(len(first) - len(second), 0)
        # Of a character that is twice in the first set the last pair counts, as in GNU's tr.
        return stdin.translate({ord(a): b for a, b in zip(first, padded, strict=False)})
    if squeezes and len(sets) == 1:
        return re.sub(f"([{re.escape(first)}])\\1+", r"\1", stdin) if first else stdin
    return None


def _tr_set(text: str) -> str | None:
    for name, chars in (
        ("lower", "abcdefghijklmnopqrstuvwxyz"),
        ("upper", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        ("digit", "0123456789"),
    ):
        text = text.replace(f"[:{name}:]", chars)
    text = text.replace("[:space:]", " \t\n\r\v\f").replace("\\n", "\n").replace("\\t", "\t")
    if "[:" in text or "\\" in text:
        return None
    return re.sub(
        r"(.)-(.)",
        lambda m: "".join(map(chr, range(ord(m[1]), ord(m[2]) + 1))),
        text,
        flags=re.DOTALL,
    )


def _cut(arguments: list[str], stdin: str | None) -> str | None:
    """Run ``cut`` for one field or the fields from one on; None if the output cannot be known."""
    joined = " ".join(arguments)
    match = re.fullmatch(r"-d ?(\S| ?\s)?(?: -f ?| -f)(\d+)(-)?", joined) or re.fullmatch(
        r"-f ?(\d+)(-)? -d ?(.)", joined
    )
    if stdin is None or match is None:
        return None
    if joined.startswith("-d"):
        delimiter, position, is_open = match[1] or " ", int(match[2]), bool(match[3])
    else:
        delimiter, position, is_open = match[3], int(match[1]), bool(match[2])
    if len(delimiter) != 1 or position == 0:
        return None
    lines = []
    for line in stdin.splitlines():
        parts = line.split(delimiter)
        # cut prints a line without the delimiter as it is.
        lines.append(
            line
            if len(parts) == 1
            else delimiter.join(
                parts[position - 1 :] if is_open else parts[position - 1 : position]
            )
        )
    return "".join(line + "\n" for line in lines)


def _sed(arguments: list[str], stdin: str | None) -> str | None:
    is_extended = bool(arguments) and arguments[0] in ("-E", "-r")
    arguments = arguments[1:] if is_extended or arguments[:1] == ["-e"] else arguments
    match = (
        re.fullmatch(r"s([/|#,])((?:\\.|(?!\1).)*)\1((?:\\.|(?!\1).)*)\1(g?)", arguments[0])
        if len(arguments) == 1
        else None
    )
    if stdin is None or match is None or len(stdin) > 4_000:
        return None
    # Only patterns that mean the same to sed and to Python, and that can't take long.
    if not re.fullmatch(r"\^?(?:[\w /:=,@%\"'<>-]|\\[./$*\[\]]|\.(?!\*))*\$?|\.\*/", match[2]):
        return None
    if not re.fullmatch(r"[\w /:=,.@%\"'<>-]*", match[3]):
        return None
    pattern = re.compile(match[2].replace("\\/", "/"))
    count = 0 if match[4] else 1
    return "".join(pattern.sub(match[3], line, count=count) + "\n" for line in stdin.splitlines())


def _lines(*, is_head: bool) -> Callable[[list[str], str | None], str | None]:
    def take(arguments: list[str], stdin: str | None) -> str | None:
        match = (
            re.fullmatch(r"(?:-n ?|-)?(\d{1,6})", " ".join(arguments))
            if arguments
            else re.fullmatch("(10)", "10")
        )
        if stdin is None or match is None:
            return None
        lines, count = stdin.splitlines(keepends=True), int(match[1])
        return "".join(lines[:count] if is_head else lines[len(lines) - min(count, len(lines)) :])

    return take


def _wc(arguments: list[str], stdin: str | None) -> str | None:
    if stdin is None or len(arguments) != 1:
        return None
    counts = {"-l": stdin.count("\n"), "-w": len(stdin.split()), "-c": len(stdin.encode())}
    return f"{counts[arguments[0]]}\n" if arguments[0] in counts else None


def _rev(arguments: list[str], stdin: str | None) -> str | None:
    return (
        None
        if stdin is None or arguments
        else "".join(line[::-1] + "\n" for line in stdin.splitlines())
    )


def _expr(arguments: list[str], _: str | None) -> str | None:
    if len(arguments) != 3 or not all(
        re.fullmatch(r"-?\d{1,15}", each) for each in (arguments[0], arguments[2])
    ):
        return None
    a, operator, b = int(arguments[0]), arguments[1], int(arguments[2])
    if operator in ("/", "%"):
        if b == 0:
            return None
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return f"{quotient if operator == '/' else a - b * quotient}\n"
    results = {"+": a + b, "-": a - b, "*": a * b}
    return f"{results[operator]}\n" if operator in results else None


_FILTERS: dict[str, Callable[[list[str], str | None], str | None]] = {
    "basename": _basename,
    "dirname": _dirname,
    "seq": _seq,
    "tr": _tr,
    "cut": _cut,
    "sed": _sed,
    "head": _lines(is_head=True),
    "tail": _lines(is_head=False),
    "wc": _wc,
    "rev": _rev,
    "expr": _expr,
}


_WRAPPER_NAMES = (
    "nohup env sudo timeout time stdbuf numactl taskset nice ionice setsid unbuffer xargs "
    "flock srun sbatch salloc bsub qsub oarsh mpirun mpiexec ray torchx sky modal kubectl "
    "dlrover-run docker podman singularity apptainer enroot conda mamba micromamba uv poetry "
    "pipenv ssh pdsh tmux screen script systemd-run chrt watch strace perf nsys ncu rocprof "
    "py-spy viztracer"
)
WRAPPERS = frozenset(_WRAPPER_NAMES.split())
"""Programs that start another one, which is among their arguments."""
STARTERS = re.compile(r"(?:.*/)?(?:python[0-9.]*|torchrun|accelerate|deepspeed|bash|sh|zsh|dash)")
_SHELLS = re.compile(r"(?:.*/)?(?:bash|sh|zsh|dash)")


def started(fields: tuple[Field, ...] | list[Field]) -> list[Field]:
    """Return the innermost command below wrappers; the command itself if it is no wrapper."""
    fields = list(fields)
    for _ in range(8):
        name = (fields[0].text.known or "").rpartition("/")[2] if fields else ""
        if name not in WRAPPERS:
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
        return STARTERS.fullmatch(known) is not None or known in WRAPPERS
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
    """Return a script in a command: after ``bash -c``, in a heredoc, or a quoted remote command."""
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
