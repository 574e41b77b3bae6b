"""Values of ``$x`` and ``${x...}``: defaults, slices, replacement, arrays, indirection."""

from collections.abc import Callable

from temper_legacy_shim.bash.syntax.syntax_tree import Parameter, Word, with_tilde
from temper_legacy_shim.bash.values.arithmetic import BadExpression, UnknownNumber, calculate
from temper_legacy_shim.bash.values.patterns import TooMuch, compiled
from temper_legacy_shim.bash.values.shell_state import Shell, Stopped
from temper_legacy_shim.bash.values.shell_values import (
    Field,
    Fragment,
    Piece,
    Text,
    Variable,
    literal,
    sourced,
    unknown,
)

_DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")


def value(shell: Shell, part: Parameter, *, in_quotes: bool) -> Text | list[Fragment]:
    """Return the value of a parameter that is no list; a default that splits gives several."""
    if part.operator == "bad":
        shell.reading.note(
            f"bash refuses {part.source[:80]} as a bad substitution and would end here", -1
        )
        raise Stopped
    if part.operator == "len":
        return _length(shell, part)
    if part.is_indirect:
        part = _indirect(shell, part)
        if not part.name:
            return unknown(part.source)
    text = _lookup(shell, part)
    if part.operator in _DEFAULTS:
        return _with_default(shell, part, text, in_quotes=in_quotes)
    if text is None:
        if shell.is_assigned(part.name):
            return Text()
        return shell.free_text(part.name, part.source, has_default=False)
    if not part.operator:
        return text
    return transformed(shell, part, text)


def elements(shell: Shell, part: Parameter) -> list[Field] | None:
    """Return the elements of ``$@`` and ``${x[@]}``; None if it is not a list."""
    is_all = part.index is not None and part.index.literal() in ("@", "*")
    if part.operator == "names":
        # ${!prefix@}: names of variables, sorted as bash does.
        names = {name for scope in shell.scopes for name in scope if name.startswith(part.name)}
        return [Field(literal(name), name) for name in sorted(names)]
    if (
        part.is_indirect
        or not (is_all or (part.name in ("@", "*") and part.index is None))
        or part.operator in ("len", "bad")
    ):
        return None
    if part.operator == "keys":
        variable = shell.find(part.name)
        keys = [] if variable is None else list(_elements_of(variable))
        return [Field(literal(str(key)), str(key)) for key in keys]
    if part.name in ("@", "*"):
        listed = _opensliced(shell, part) or shell.arguments()
    else:
        variable = shell.find(part.name)
        if variable is None and not part.operator:
            return [
                Field(
                    shell.free_text(part.name, part.source, has_default=False), f'"{part.source}"'
                )
            ]
        listed = [] if variable is None else list(_elements_of(variable).values())
    if part.operator in _DEFAULTS:
        is_present = bool(listed) and not (
            part.operator.startswith(":") and not any(field.text.pieces for field in listed)
        )
        return None if is_present == part.operator.endswith("+") or not is_present else listed
    if not part.operator or (shell.positional is None and part.name in ("@", "*")):
        return listed
    if part.operator == ":":
        variable = shell.find(part.name)
        keys = [] if variable is None else list(_elements_of(variable))
        # Slices of arrays count indices, which may have holes, and not positions.
        indices = [key if isinstance(key, int) else position for position, key in enumerate(keys)]
        return sliced(shell, part, listed, indices)
    texts = [transformed(shell, part, field.text) for field in listed]
    return [Field(text, text.raw()) for text in texts]


def _opensliced(shell: Shell, part: Parameter) -> list[Field] | None:
    """Return ``"${@:2}"`` of the script's arguments."""
    if shell.positional is not None or part.operator != ":":
        return None
    first = shell.interpreter.expand_text(shell, part.operands[0]).shown().strip()
    if len(part.operands) > 1 or not first.isdigit():
        return [Field(unknown(part.source, is_unset=True), f'"{part.source}"')]
    name = f"$@ from {int(first) + shell.shifted}" if int(first) + shell.shifted > 1 else "$@"
    return [
        Field(Text((Piece(name, part.source, is_known=False, is_unset=True),)), f'"{part.source}"')
    ]


def is_open_array(field: Field) -> bool:
    """Check if a field stands for all elements of an array that only a run knows."""
    return not field.text.is_known and field.text.shown().endswith("[@]}")


def _elements_of(variable: Variable) -> dict[int | str, Field]:
    if variable.elements is None:
        return {} if variable.text is None else {0: Field(variable.text, variable.text.raw())}
    if variable.is_associative:
        return variable.elements
    return {key: variable.elements[key] for key in sorted(variable.elements, key=int)}


def element_text(shell: Shell, variable: Variable, index: str) -> Text | None:
    """Return the element at a subscript; an unknown subscript gives an unknown text."""
    if variable.is_associative:
        field = (variable.elements or {}).get(index.strip("\"'"))
        return None if field is None else field.text
    try:
        number = calculate_number(shell, index)
    except (UnknownNumber, BadExpression):
        return unknown(index)
    result = _elements_of(variable)
    # Bash counts negative subscripts from the end, the highest index plus one.
    if number < 0 and result:
        number += max(int(key) for key in result) + 1
    field = result.get(number)
    return None if field is None else field.text


def assign_element(
    shell: Shell, name: str, index: str, text: Text, *, is_appending: bool = False
) -> None:
    """Run ``name[index]=text``; an unknown index leaves the array as it is and adds a note."""
    variable = shell.variable(name)
    if variable.elements is None:
        variable.elements = (
            {} if variable.text is None else {0: Field(variable.text, variable.text.raw())}
        )
        # A scalar becomes element 0 of the array, as in bash.
        variable.text = None
    key: int | str = index.strip("\"'")
    if not variable.is_associative:
        try:
            key = calculate_number(shell, index)
        except (UnknownNumber, BadExpression):
            shell.reading.note(f"the subscript {index!r} of {name} is not known", -1)
            return
        if key < 0:
            key += max((int(each) for each in variable.elements), default=-1) + 1
    old = variable.elements.get(key)
    new = old.text + text if is_appending and old is not None else text
    variable.elements[key] = Field(new, new.raw())


def calculate_number(shell: Shell, expression: str) -> int:
    """Evaluate an arithmetic expression; its assignments have no effect.

    Raises:
        UnknownNumber: a variable has no known value.
        BadExpression: bash would refuse the expression.
    """

    def read(name: str) -> str | None:
        text = shell.scalar(name)
        if text is not None and not text.is_known:
            raise UnknownNumber
        return None if text is None else text.shown()

    return calculate(expression, read=read, write=lambda _name, _value: None)


def _lookup(shell: Shell, part: Parameter) -> Text | None:
    if part.index is None or part.index.literal() in ("@", "*"):
        if part.name in ("@", "*") or part.index is not None:
            listed = elements(shell, Parameter(part.name, part.source, part.index)) or []
            if not listed or (len(listed) == 1 and listed[0].text.is_unset):
                return None
            text = Text()
            for number, field in enumerate(listed):
                text = text + literal(" ") + field.text if number else field.text
            return text
        return shell.scalar(part.name)
    variable = shell.find(part.name)
    if variable is None:
        return None
    index = shell.interpreter.expand_text(shell, part.index)
    return element_text(shell, variable, index.shown()) if index.is_known else unknown(part.source)


def _length(shell: Shell, part: Parameter) -> Text:
    if (part.index is not None and part.index.literal() in ("@", "*")) or part.name in ("@", "*"):
        listed = elements(shell, Parameter(part.name, part.source, part.index)) or []
        if any(
            field.text.is_unset or field.text.shown().startswith("$@") or is_open_array(field)
            for field in listed
            if not field.text.is_known
        ):
            return unknown(part.source)
        return literal(str(len(listed)))
    text = _lookup(shell, part)
    if text is None:
        return (
            literal("0")
            if shell.is_assigned(part.name)
            else shell.free_text(part.name, part.source, has_default=False)
        )
    return literal(str(len(text.shown()))) if text.is_known else unknown(part.source)


def _indirect(shell: Shell, part: Parameter) -> Parameter:
    """Return ``${!x}`` as ``${value of x}``; its name is empty if the value is unknown."""
    text = _lookup(shell, Parameter(part.name, part.source, part.index))
    # A name that only a run knows could be any variable, so the result stays unknown.
    known = None if text is None else text.known
    is_name = known is not None and (known.isidentifier() or known.isdigit())
    return Parameter(
        known if is_name and known else "", part.source, None, part.operator, part.operands
    )


def _with_default(
    shell: Shell, part: Parameter, text: Text | None, *, in_quotes: bool
) -> Text | list[Fragment]:
    """Expand ``${x-word}``, ``=``, ``+`` and ``?``; with a colon also for an empty x.

    Bash ends at ``?`` if x is unset. The reading then stops, too, unless it passes guards.
    """
    if text is None and not shell.is_assigned(part.name) and part.name not in ("@", "*"):
        shell.free_text(part.name, part.source, has_default=part.operator not in ("?", ":?"))
    is_present = text is not None and (
        not part.operator.startswith(":") or bool(text.shown()) or not text.is_known
    )
    if part.operator in ("+", ":+"):
        return _operand(shell, part, in_quotes=in_quotes) if is_present else Text()
    if is_present and text is not None:
        return text
    if part.operator in ("?", ":?"):
        if shell.is_assigned(part.name):
            shell.reading.note(f"{part.source[:80]} is not satisfied: bash would end here", -1)
            if shell.reading.passes_guards:
                return unknown(part.source, is_unset=True)
            raise Stopped
        return unknown(part.source, is_unset=True)
    result = _operand(shell, part, in_quotes=in_quotes)
    if part.operator in ("=", ":="):
        default = (
            result
            if isinstance(result, Text)
            else shell.interpreter.expand_text(shell, part.operands[0])
        )
        if part.index is None and part.name.isidentifier():
            shell.assign(part.name, default)
    return result


def _operand(shell: Shell, part: Parameter, *, in_quotes: bool) -> Text | list[Fragment]:
    """Return the word of a default: a value with its source, or fragments if the word splits."""
    word = part.operands[0] if in_quotes else with_tilde(part.operands[0])
    parts = shell.interpreter.expand_fragments(shell, word, in_quotes=in_quotes)
    separators = shell.separators()
    is_split = any(
        fragment.is_break
        or (
            not fragment.is_quoted
            and any(
                piece.is_known and set(piece.value) & set(separators) for piece in fragment.pieces
            )
        )
        for fragment in parts
    )
    if is_split:
        return [fragment if fragment.is_break else _splitting(fragment) for fragment in parts]
    text = Text(
        tuple(
            piece for fragment in parts for piece in fragment.pieces if piece.value or piece.source
        )
    )
    if any(fragment.is_quoted for fragment in parts) and not in_quotes:
        full = sourced(text, part.source)
        return [Fragment(full.pieces, is_quoted=True)]
    return text


def _splitting(fragment: Fragment) -> Fragment:
    return Fragment(
        fragment.pieces, fragment.is_quoted, splits=not fragment.is_quoted, origin=fragment.origin
    )


_MAX_SCANNED = 2_000
"""Characters of a value that patterns are tried on, from every place to every place."""


def transformed(shell: Shell, part: Parameter, text: Text) -> Text:
    """Return a value after the operator of its expansion."""
    known = text.known
    operator = part.operator
    if known is None:
        return unknown(part.source)
    try:
        if operator in ("#", "##", "%", "%%"):
            return _applied(
                part,
                known,
                _pattern(shell, part),
                lambda pattern, t: _trimmed(pattern, t, operator),
            )
        if operator.startswith("/"):
            return _replaced(shell, part, known)
        if operator in ("^", "^^", ",", ",,"):
            return (
                literal(_cased(known, operator))
                if not part.operands[0].source
                else unknown(part.source)
            )
        if operator == ":":
            return _part_of(shell, part, known)
    except TooMuch:
        return unknown(part.source)
    if operator in ("@U", "@L", "@u"):
        return literal(
            {"@U": known.upper(), "@L": known.lower(), "@u": known[:1].upper() + known[1:]}[
                operator
            ]
        )
    return unknown(part.source)


def _pattern(shell: Shell, part: Parameter) -> list[tuple[str, bool]] | None:
    pieces, is_known, _ = shell.interpreter.expand_pattern(shell, part.operands[0])
    return pieces if is_known else None


def _applied(
    part: Parameter,
    known: str,
    pieces: list[tuple[str, bool]] | None,
    change: Callable[[list[tuple[str, bool]], str], str],
) -> Text:
    if pieces is None or len(known) > _MAX_SCANNED:
        return unknown(part.source)
    return literal(change(pieces, known))


def _trimmed(pieces: list[tuple[str, bool]], text: str, operator: str) -> str:
    pattern = compiled(pieces)
    ends = range(len(text) + 1)
    if operator in ("#", "%%"):
        order = iter(ends)
    else:
        order = reversed(ends)
    for at in order:
        if operator.startswith("#") and pattern.fullmatch(text, 0, at):
            return text[at:]
        if operator.startswith("%") and pattern.fullmatch(text, at):
            return text[:at]
    return text


def _replaced(shell: Shell, part: Parameter, known: str) -> Text:
    """Replace a pattern: ``/`` once, ``//`` everywhere, ``/#`` at the start, ``/%`` at the end."""
    pieces = _pattern(shell, part)
    replacement = (
        shell.interpreter.expand_text(shell, part.operands[1]) if len(part.operands) > 1 else Text()
    )
    if pieces is None or not replacement.is_known or len(known) > _MAX_SCANNED:
        return unknown(part.source)
    pattern, new = compiled(pieces), replacement.shown()
    if not pattern.pattern:
        return literal(
            new + known
            if part.operator == "/#"
            else known + new
            if part.operator == "/%"
            else known
        )
    if part.operator == "/#":
        match = pattern.match(known)
        return literal(known if match is None else new + known[match.end() :])
    if part.operator == "/%":
        start = next((at for at in range(len(known) + 1) if pattern.fullmatch(known, at)), None)
        return literal(known if start is None else known[:start] + new)
    out, at = [], 0
    for match in pattern.finditer(known):
        if match.end() == match.start():
            continue
        out += [known[at : match.start()], new]
        at = match.end()
        if part.operator == "/":
            break
    return literal("".join(out) + known[at:])


def _cased(text: str, operator: str) -> str:
    if len(operator) == 2:
        return text.upper() if operator == "^^" else text.lower()
    return (text[:1].upper() if operator == "^" else text[:1].lower()) + text[1:]


def _bounds(shell: Shell, operands: tuple[Word, ...]) -> list[int] | None:
    """Return the offset and length of ``${x:offset:length}``; None if one is not known."""
    out = []
    for operand in operands:
        text = shell.interpreter.calculate(shell, operand, operand.source).known
        if text is None:
            return None
        out.append(int(text))
    return out


def _part_of(shell: Shell, part: Parameter, known: str) -> Text:
    bounds = _bounds(shell, part.operands)
    if bounds is None:
        return unknown(part.source)
    start = bounds[0] if bounds[0] >= 0 else len(known) + bounds[0]
    if not 0 <= start <= len(known):
        return Text()
    end = (
        len(known)
        if len(bounds) < 2
        else start + bounds[1]
        if bounds[1] >= 0
        else len(known) + bounds[1]
    )
    return literal(known[start : max(end, start)])


def sliced(shell: Shell, part: Parameter, listed: list[Field], indices: list[int]) -> list[Field]:
    """Return ``${x[@]:offset:length}``; the offset counts missing elements, too."""
    bounds = _bounds(shell, part.operands)
    if bounds is None:
        return [Field(unknown(part.source), f'"{part.source}"')]
    if part.name in ("@", "*"):
        listed = [Field(unknown("$0"), '"$0"'), *listed]
    keys = list(range(len(listed))) if part.name in ("@", "*") else indices
    start = bounds[0] if bounds[0] >= 0 else max([*keys, -1]) + 1 + bounds[0]
    result = (
        [field for key, field in zip(keys, listed, strict=True) if key >= start]
        if start >= 0
        else []
    )
    return result if len(bounds) < 2 else result[: max(bounds[1], 0)]
