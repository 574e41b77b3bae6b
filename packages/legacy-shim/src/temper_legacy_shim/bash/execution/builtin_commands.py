"""Builtins that change or print the shell's state; control flow is in ``evaluator``."""

import re
from collections.abc import Callable

from temper_legacy_shim.bash.syntax.syntax_tree import Literal, Span, Word
from temper_legacy_shim.bash.values import expansion
from temper_legacy_shim.bash.values.shell_state import Shell
from temper_legacy_shim.bash.values.shell_values import Field, Text, Variable, literal, unknown

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_FORMAT = re.compile(r"%(%|([-+ #0]*)(\d+|\*)?(?:\.(\d+|\*)?)?([diouxXeEfgGcsbq]))")
_BACKSLASH = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "f": "\f",
    "v": "\v",
    "\\": "\\",
}


def prints(shell: Shell, text: Text) -> None:
    """Add to the output of a substitution."""
    if shell.captured is not None:
        shell.captured = shell.captured + text


def _echo(shell: Shell, fields: list[Field]) -> None:
    ends, has_escapes = "\n", False
    while fields and (option := fields[0].text.known) and re.fullmatch(r"-[neE]+", option):
        ends = "" if "n" in option else ends
        has_escapes = "e" in option or (has_escapes and "E" not in option)
        fields = fields[1:]
    text = Text()
    for number, field in enumerate(fields):
        text = text + literal(" ") + field.text if number else field.text
    if has_escapes and text.is_known:
        text = literal(unescaped(text.shown()))
    prints(shell, text + literal(ends))


def unescaped(text: str) -> str:
    """Resolve the backslashes of ``echo -e`` and ``printf``."""
    return re.sub(r"\\([ntrabefv\\])", lambda match: _BACKSLASH[match[1]], text)


def _printf(shell: Shell, fields: list[Field]) -> None:
    name = None
    if len(fields) >= 2 and fields[0].text.known == "-v":
        name, fields = fields[1].text.known, fields[2:]
    if fields and fields[0].text.known == "--":
        fields = fields[1:]
    if not fields:
        shell.status = 2
        return
    text = _formatted(fields[0].text, [field.text for field in fields[1:]])
    if name is not None:
        shell.assign(name, text)
    else:
        prints(shell, text)


def _formatted(pattern: Text, arguments: list[Text]) -> Text:
    """Return ``printf``'s output, unknown if a format other than ``%s`` has an unknown argument."""
    if not pattern.is_known:
        return unknown("\0")
    given = pattern.shown()
    left, out, rounds = list(arguments), Text(), 0
    while rounds == 0 or (left and rounds < 500):
        rounds += 1
        at, num_before = 0, len(left)
        for match in _FORMAT.finditer(given):
            out = out + literal(unescaped(given[at : match.start()]))
            at = match.end()
            if match[1] == "%":
                out = out + literal("%")
                continue
            if "*" in match[0]:
                return unknown("\0")
            out = out + _conversion(match, left.pop(0) if left else None)
        out = out + literal(unescaped(given[at:]))
        if len(left) == num_before:
            break
    return out


def _conversion(match: re.Match[str], argument: Text | None) -> Text:
    """Format one argument of ``printf``; a text that is no number counts as 0."""
    kind = match[5]
    if argument is None:
        argument = literal("" if kind in "sbqc" else "0")
    if match[0] == "%s":
        return argument
    known = argument.known
    if known is None:
        return unknown("\0")
    pattern = f"%{match[2]}{match[3] or ''}{'.' + match[4] if match[4] else ''}"
    try:
        if kind in "sb":
            return literal((pattern + "s") % (unescaped(known) if kind == "b" else known))
        if kind == "c":
            return literal(known[:1])
        if kind in "diouxX":
            number = int(known, 0) if not re.fullmatch(r"-?0\d+", known) else int(known, 8)
            return literal((pattern + kind.replace("i", "d")) % number)
        if kind in "eEfgG":
            return literal((pattern + kind) % float(known))
    except (ValueError, OverflowError):
        return literal("0")
    return unknown("\0")


def declare(shell: Shell, name: str, fields: list[Field], *, has_value: bool = False) -> None:
    """Run ``declare``, ``local``, ``export`` or ``readonly``."""
    flags = ""
    for field in fields:
        text = field.text.shown()
        if text[:1] in ("-", "+") and len(text) > 1:
            flags += text[1:] if text[0] == "-" else ""
            continue
        match = _ASSIGNED.match(text)
        variable_name = match[1] if match else text
        if not re.fullmatch(r"[A-Za-z_]\w*", variable_name):
            continue
        if "n" in flags and name in ("declare", "typeset", "local"):
            shell.reading.note(
                f"{variable_name} is a reference to another variable, which is not followed",
                field.at,
            )
        is_local = name == "local" or (name in ("declare", "typeset") and "g" not in flags)
        variable = _declared(
            shell,
            variable_name,
            is_local=is_local,
            exists=has_value or match is not None or name != "export",
        )
        if variable is None:
            continue
        _set_attributes(variable, flags, is_export=name == "export")
        if match:
            value = field.text.after(match[0]) or Text()
            old = variable.scalar()
            shell.assign(variable_name, old + value if match[2] and old is not None else value)


def _declared(shell: Shell, name: str, *, is_local: bool, exists: bool) -> Variable | None:
    scope = shell.scopes[-1] if is_local else None
    if scope is not None and name not in scope:
        scope[name] = Variable()
    result = shell.find(name)
    return shell.variable(name) if result is not None or exists else None


def _set_attributes(variable: Variable, flags: str, *, is_export: bool) -> None:
    variable.is_exported = variable.is_exported or is_export or "x" in flags
    variable.is_integer = variable.is_integer or "i" in flags
    variable.case = "lower" if "l" in flags else "upper" if "u" in flags else variable.case
    if ("a" in flags or "A" in flags) and variable.elements is None:
        variable.elements = {}
    variable.is_associative = variable.is_associative or "A" in flags


def read(
    shell: Shell,
    name: str,
    fields: list[Field],
    stdin: Text | None,
    *,
    separators: str | None = None,
) -> None:
    """Run ``read`` on text in the script; it fails at the end of the input or for unknown input."""
    names = [text for field in fields if not (text := field.text.shown()).startswith("-")]
    options = "".join(text[1:] for field in fields if (text := field.text.shown()).startswith("-"))
    known = None if stdin is None else stdin.known
    shell.status = 1
    if name == "read" and "d" in options and names and names[0] == "":
        names = names[1:]
    if known is None or (name == "read" and not known):
        for each in names or ["MAPFILE" if name != "read" else "REPLY"]:
            if each.isidentifier() and (name != "read" or "a" in options):
                # One element stands for all of them: only a run knows how many there are.
                value = unknown(f"${{{each}[@]}}")
                shell.variable(each).elements = {0: Field(value, value.raw())}
            elif each.isidentifier():
                shell.assign(each, Text() if stdin is None else unknown(f"${{{each}}}"))
        return
    shell.status = 0
    if name != "read":
        lines = known.splitlines()
        variable = shell.variable(names[-1] if names else "MAPFILE")
        variable.elements = {
            number: Field(literal(line), literal(line).raw()) for number, line in enumerate(lines)
        }
        return
    between = shell.separators() if separators is None else separators
    line, _, rest = (known, "", "") if "d" in options else known.partition("\n")
    if shell.stdin is stdin:
        shell.stdin = literal(rest)
    if "a" in options and names:
        words = _split(line, between)
        shell.variable(names[-1]).elements = {
            number: Field(literal(word), literal(word).raw()) for number, word in enumerate(words)
        }
        return
    _assign_words(shell, names or ["REPLY"], line, between)


def _split(line: str, separators: str) -> list[str]:
    if not separators.strip(" \t\n"):
        return line.split() if separators else [line]
    words = re.split(f"[{re.escape(separators)}]", line)
    return words[:-1] if words[-1] == "" else words


def _assign_words(shell: Shell, names: list[str], line: str, separators: str) -> None:
    only = separators.strip(" \t\n")
    rest = line if not separators else line.strip(" \t\n" if not only else "")
    for number, each in enumerate(names):
        if not each.isidentifier():
            continue
        if number == len(names) - 1 or not separators:
            shell.assign(each, literal(rest))
        else:
            first = re.split(
                f"[{re.escape(separators)}]" + ("+" if not only else ""), rest, maxsplit=1
            )
            shell.assign(each, literal(first[0]))
            rest = first[1] if len(first) > 1 else ""


def _set(shell: Shell, fields: list[Field]) -> None:
    for number, field in enumerate(fields):
        text = field.text.known
        if text in ("--", "-"):
            shell.positional, shell.shifted = fields[number + 1 :], 0
            return
        if text is not None and text[:1] in ("-", "+"):
            continue
        if number and (fields[number - 1].text.known or "").endswith("o"):
            continue
        shell.positional, shell.shifted = fields[number:], 0
        return


def _shift(shell: Shell, fields: list[Field]) -> None:
    count = (
        int(text)
        if fields and (text := fields[0].text.known or "").isdigit() and len(text) < 6
        else 1
    )
    if shell.positional is None:
        shell.shifted += count
        shell.reading.num_arguments = max(shell.reading.num_arguments, shell.shifted)
    elif count <= len(shell.positional):
        shell.positional = shell.positional[count:]
    else:
        shell.status = 1


def _unset(shell: Shell, fields: list[Field]) -> None:
    for field in fields:
        name = field.text.known or ""
        match = re.fullmatch(r"([A-Za-z_]\w*)\[([^\]]*)\]", name)
        if (
            match
            and (variable := shell.find(match[1])) is not None
            and variable.elements is not None
        ):
            key = (
                match[2] if variable.is_associative else int(match[2]) if match[2].isdigit() else -1
            )
            variable.elements.pop(key, None)
        elif name.isidentifier():
            shell.unset(name)
            shell.functions.pop(name, None)


def _let(shell: Shell, fields: list[Field]) -> None:
    known: str | None = "0"
    for field in fields:
        source = field.text.shown()
        known = expansion.arithmetic(
            shell, Word((Literal(source, is_quoted=True),), source, Span(-1, -1)), source
        ).known
    shell.status = None if known is None else int(int(known) == 0)


def _change_folder(shell: Shell, fields: list[Field]) -> None:
    shell.status = 0
    shell.reading.folders |= dict.fromkeys(field.text.shown() for field in fields)


def _nothing(shell: Shell, fields: list[Field]) -> None:
    shell.status = 0


def _false(shell: Shell, fields: list[Field]) -> None:
    shell.status = 1


def _unknown(shell: Shell, fields: list[Field]) -> None:
    shell.status = None
    prints(shell, unknown("\0"))


BUILTINS: dict[str, Callable[[Shell, list[Field]], None]] = {
    "echo": _echo,
    "printf": _printf,
    "set": _set,
    "shift": _shift,
    "unset": _unset,
    "let": _let,
    "cd": _change_folder,
    "pushd": _change_folder,
    ":": _nothing,
    "true": _nothing,
    "false": _false,
    **dict.fromkeys(
        (
            "popd",
            "trap",
            "ulimit",
            "umask",
            "shopt",
            "alias",
            "unalias",
            "hash",
            "enable",
            "history",
        ),
        _nothing,
    ),
    **dict.fromkeys(
        ("wait", "jobs", "disown", "bg", "fg", "suspend", "bind", "complete", "compgen"), _nothing
    ),
    **dict.fromkeys(
        ("pwd", "type", "times", "caller", "dirs", "getopts", "kill", "help"), _unknown
    ),
    # Those that the evaluator handles itself.
    **dict.fromkeys(
        (
            "exit",
            "return",
            "break",
            "continue",
            "eval",
            "source",
            ".",
            "command",
            "builtin",
            "exec",
            "read",
            "mapfile",
            "readarray",
        ),
        _nothing,
    ),
    **dict.fromkeys(("declare", "typeset", "local", "export", "readonly"), _nothing),
}
