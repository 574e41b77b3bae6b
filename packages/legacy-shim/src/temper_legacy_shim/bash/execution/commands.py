"""Simple commands: the shell's own, functions, and external ones, which are recorded."""

import posixpath

from temper_legacy_shim.bash.execution import builtin_commands, conditions, external_commands
from temper_legacy_shim.bash.syntax.parser import parse
from temper_legacy_shim.bash.syntax.syntax_tree import (
    Assignment,
    Literal,
    Redirect,
    Simple,
    Span,
    Word,
)
from temper_legacy_shim.bash.values import expansion, parameters
from temper_legacy_shim.bash.values.shell_state import (
    MAX_STEPS,
    Event,
    Exit,
    Jump,
    Reading,
    Return,
    Shell,
    SourcedFile,
)
from temper_legacy_shim.bash.values.shell_values import Field, Text, Variable, literal, unknown
from temper_legacy_shim.errors import ScriptError

MAX_EVENTS = 10_000
MAX_SOURCING = 20
CHARACTERS_PER_STEP = 20
"""Length of text whose parsing counts as one step."""
"""Commands a script would run."""


def run_simple(shell: Shell, command: Simple, *, is_tested: bool) -> None:
    """Run a command with its arguments, or assignments without a command.

    Args:
        shell: the shell the command changes.
        command: the parsed command.
        is_tested: whether ``&&`` or ``||`` continues by its status.
    """
    if shell.reading.inner is None:
        shell.reading.executed.add(command.span.start)
    words = [word for word in command.words if isinstance(word, Word)]
    if not words:
        shell.status = 0
        for assignment in command.assignments:
            assign(shell, assignment)
        for redirect in command.redirects:
            stdin_of(shell, (redirect,))
        return
    # Before the redirections, in bash's order: a substitution in the words may read the outer
    # input.
    fields = expansion.expand_words(shell, words)
    stdin = stdin_of(shell, command.redirects)
    if not fields:
        shell.status = 0
        return
    name = fields[0].text.known
    # Functions come before builtins in bash, except after `command` and `builtin`.
    if name in shell.functions:
        _run_function(shell, command, name, fields)
        return
    environment = tuple((each.name, assignment_text(shell, each)) for each in command.assignments)
    if (
        shell.reading.inner is None
    ):  # after all that may run commands of its own: A=$(...), a heredoc
        shell.reading.arguments = Span(words[0].span.start, words[-1].span.end)
    printed_before = shell.captured
    if name in builtin_commands.BUILTINS:
        declared = [word for word in command.words if isinstance(word, Assignment)]
        _run_builtin(
            shell,
            name,
            fields,
            declared=declared,
            stdin=stdin,
            environment=environment,
            span=command.span,
            is_tested=is_tested,
        )
    elif name in ("test", "["):
        shell.status = _bracket_status(shell, name, fields[1:], command.span, is_decided=is_tested)
    else:
        _run_other(shell, fields, environment=environment, span=command.span, stdin=stdin)
    # A text that goes to a file, or to a scheduler such as sbatch, may be the script that launches.
    if prints_elsewhere(command.redirects) or name in external_commands.SUBMITTERS:
        written = fields[-1].text if name in ("echo", "printf") else stdin
        if (
            written is not None
            and not shell.reading.is_writing
            and shell.reading.hooks.is_launch_text(written.shown())
        ):
            shell.reading.is_writing = True
            try:
                run_inner(
                    _started_shell(shell, environment), written, span=command.span, is_shell=True
                )
            finally:
                shell.reading.is_writing = False
    if (
        prints_elsewhere(command.redirects)
        and shell.captured is not None
        and printed_before is not None
    ):
        shell.captured = printed_before


def _bracket_status(
    shell: Shell, name: str, fields: list[Field], span: Span, *, is_decided: bool
) -> int | None:
    if name == "[":
        # bash prints an error, and the status is 2.
        if not fields or fields[-1].text.known != "]":
            return 2
        fields = fields[:-1]
    try:
        truth = conditions.test_fields(shell, fields)
    except conditions.Malformed:
        return 2
    return shell.interpreter.truth_status(shell, truth, span, is_decided=is_decided)


def _run_function(shell: Shell, command: Simple, name: str, fields: list[Field]) -> None:
    # bash itself would recurse until memory ends; launch scripts call a few levels.
    if len(shell.scopes) > 40:
        raise ScriptError(f"the function {name!r} calls itself more than 40 levels deep.")
    for assignment in command.assignments:
        assign(shell, assignment)
    outer = shell.positional, shell.shifted
    shell.positional, shell.shifted = fields[1:], 0
    if any(field.source == '"$@"' and not field.text.is_known for field in shell.positional):
        # The script's own arguments, handed on: still open, unless others come with them.
        shell.positional = None if len(shell.positional) == 1 else shell.positional
        shell.shifted = outer[1] if shell.positional is None else 0
    reading, outer_span = shell.reading, shell.reading.inner
    if name in reading.inner_functions:
        reading.inner = reading.inner or command.span
    shell.scopes.append({})
    try:
        shell.interpreter.run_command(shell, shell.functions[name])
    except Return:
        pass
    finally:
        shell.scopes.pop()
        shell.positional, shell.shifted = outer
        reading.inner = outer_span


def _run_builtin(
    shell: Shell,
    name: str,
    fields: list[Field],
    *,
    declared: list[Assignment],
    stdin: Text | None,
    environment: tuple[tuple[str, Text], ...],
    span: Span,
    is_tested: bool,
) -> None:
    shell.status = 0
    match name:
        case "exit" | "return":
            shell.status = (
                int(code)
                if len(fields) > 1 and (code := fields[1].text.known or "").isdigit()
                else shell.status
            )
            if name == "exit" and shell.reading.passes_guards and shell.status:
                shell.reading.note(
                    "the script would end there with an error as it was read; what follows was "
                    "read all the same",
                    span.start,
                )
                return
            raise Exit if name == "exit" else Return
        case "break" | "continue":
            levels = (
                int(count)
                if len(fields) > 1 and (count := fields[1].text.known or "").isdigit()
                else 1
            )
            raise Jump(is_break=name == "break", levels=max(levels, 1))
        case "eval":
            joined = Text()
            for number, field in enumerate(fields[1:]):
                joined = joined + literal(" ") + field.text if number else field.text
            run_inner(shell, joined, span=span)
        case "source" | ".":
            _source(shell, fields, span=span)
        case "command" | "builtin" | "exec" if len(fields) > 1 and not (
            fields[1].text.known or ""
        ).startswith("-"):
            _run_named(
                shell,
                fields[1:],
                environment=environment,
                span=span,
                stdin=stdin,
                is_tested=is_tested,
            )
            # exec replaces the shell, so the rest of the script does not run.
            if name == "exec":
                raise Exit
        # `command -v x` asks whether a program exists, which depends on the machine.
        case "command":
            shell.status = None
        case "read" | "mapfile" | "readarray":
            separators = dict(environment).get("IFS")
            given = stdin if stdin is not None else shell.stdin
            builtin_commands.read(
                shell,
                name,
                fields[1:],
                given,
                separators=None if separators is None else separators.known,
            )
        case "declare" | "typeset" | "local" | "export" | "readonly":
            builtin_commands.declare(shell, name, fields[1:])
            for assignment in declared:
                builtin_commands.declare(
                    shell,
                    name,
                    [*fields[1:], Field(literal(assignment.name), assignment.name)],
                    has_value=True,
                )
                assign(shell, assignment)
        case _:
            builtin_commands.BUILTINS[name](shell, fields[1:])


def _source(shell: Shell, fields: list[Field], *, span: Span) -> None:
    """Run the text of a sourced file in this shell, or note that it was not read."""
    name = fields[1].text.shown() if len(fields) > 1 else ""
    reading = shell.reading
    sourced = reading.hooks.read_sourced(name)
    if sourced is None or not _can_source(reading, sourced):
        if name:
            reading.note(
                f"{fields[1].source} is sourced and was not read: what it sets is not known here",
                span.start,
            )
        shell.status = None
        return
    if sourced.path.startswith("..") and sourced.path != posixpath.normpath(name):
        reading.note(f"{fields[1].source} was read from {sourced.path}", span.start)
    outer = shell.positional, shell.shifted
    if len(fields) > 2:
        shell.positional, shell.shifted = fields[2:], 0
    reading.sourcing.append(sourced.path)
    try:
        run_inner(shell, literal(sourced.text), span=span)
    except Return:
        pass
    finally:
        reading.sourcing.pop()
        shell.positional, shell.shifted = outer


def _can_source(reading: Reading, sourced: SourcedFile) -> bool:
    """Check that a file does not source itself, and is not too long to be read with the script."""
    # A file may source itself behind a guard that only a run decides.
    is_cycle = sourced.path in reading.sourcing or len(reading.sourcing) >= MAX_SOURCING
    steps = reading.steps + len(sourced.text) // CHARACTERS_PER_STEP
    return not is_cycle and steps <= MAX_STEPS // 2


def _run_named(
    shell: Shell,
    fields: list[Field],
    *,
    environment: tuple[tuple[str, Text], ...],
    span: Span,
    stdin: Text | None,
    is_tested: bool,
) -> None:
    """Run ``command x`` and ``exec x``, which ignore functions."""
    name = fields[0].text.known
    if name in builtin_commands.BUILTINS:
        _run_builtin(
            shell,
            name,
            fields,
            declared=[],
            stdin=stdin,
            environment=environment,
            span=span,
            is_tested=is_tested,
        )
    else:
        _run_other(shell, fields, environment=environment, span=span, stdin=stdin)


def _run_other(
    shell: Shell,
    fields: list[Field],
    *,
    environment: tuple[tuple[str, Text], ...],
    span: Span,
    stdin: Text | None,
) -> None:
    """Record an external command, and compute its output if the inputs are known."""
    reading = shell.reading
    given = stdin if stdin is not None else shell.stdin
    failure = reading.hooks.explain_failure(fields)
    if failure is not None:
        reading.note(failure, span.start)
        shell.status = 1
        return
    printed = external_commands.output(fields, given)
    shell.status = 0 if printed is not None else None
    if shell.captured is not None:
        # A NUL cannot occur in bash's values, so it marks unknown output without a spelling of its
        # own.
        shell.captured = shell.captured + (printed if printed is not None else unknown("\0"))
    if printed is not None:
        return
    if len(reading.events) > MAX_EVENTS:
        raise ScriptError(
            f"the script runs more than {MAX_EVENTS} commands: it does more than launch, or loops "
            "for ever."
        )
    reading.events.append(
        Event(
            fields=tuple(fields),
            environment=environment,
            span=reading.inner or span,
            arguments=reading.arguments,
            item=reading.item,
            stdin=given,
            input_file=reading.input_file,
            is_inner=reading.inner is not None,
            is_written=reading.is_writing,
            sourced_file="".join(reading.sourcing[-1:]),
        )
    )
    inner = external_commands.inner_script(fields, given)
    if inner is not None and not external_commands.is_hidden(inner):
        run_inner(_started_shell(shell, environment), inner, span=span, is_shell=True)


def _started_shell(shell: Shell, environment: tuple[tuple[str, Text], ...]) -> Shell:
    """Start another shell with the exported variables and without functions."""
    child = shell.fork()
    # Functions pass to another shell only by export -f, which is not followed.
    child.functions, child.captured = {}, None
    exported = {
        name: variable
        for scope in child.scopes
        for name, variable in scope.items()
        if variable.is_exported
    }
    exported |= {name: Variable(text, is_exported=True) for name, text in environment}
    child.scopes = [exported]
    return child


def run_inner(shell: Shell, text: Text, *, span: Span, is_shell: bool = False) -> None:
    """Run a script in a text: the argument of ``eval`` or ``bash -c``, or a heredoc to ``bash``."""
    reading = shell.reading
    if shell.forks > 50:
        raise ScriptError("eval inside eval, more than 50 levels deep.")
    # Parsing takes time by length, so that eval in a loop reaches the limit of steps.
    reading.steps += len(text.shown()) // CHARACTERS_PER_STEP
    reading.step()
    try:
        program = parse(
            "".join(
                piece.value if piece.is_known else (piece.source or piece.value)
                for piece in text.pieces
            )
        )
    except ScriptError as error:
        reading.note(f"text that is run as a script is no script: {error}", span.start)
        shell.status = 2
        return
    outer, reading.inner = reading.inner, reading.inner or span
    shell.forks += 1
    try:
        if is_shell:
            shell.interpreter.run_isolated(shell, program)
        else:
            shell.interpreter.run(shell, program)
    finally:
        reading.inner = outer
        shell.forks -= 1


def stdin_of(shell: Shell, redirects: tuple[Redirect, ...]) -> Text | None:
    """Return the input from heredocs and here-strings; None without redirection."""
    # Text from a file is unknown.
    given: Text | None = None
    file = ""
    for redirect in redirects:
        if redirect.operator in ("<<", "<<-"):
            given = expansion.expand_text(shell, redirect.target)
        elif redirect.operator == "<<<":
            given = expansion.expand_text(shell, redirect.target) + literal("\n")
        elif redirect.operator == "<":
            file = expansion.expand_text(shell, redirect.target).shown()
            given = unknown("\0")
        elif redirect.target is not None:
            expansion.expand_text(shell, redirect.target)
    shell.reading.input_file = file
    return given


def prints_elsewhere(redirects: tuple[Redirect, ...]) -> bool:
    """Check if a command's output goes to a file."""
    return any(redirect.operator in (">", ">>", "&>", "&>>", ">|") for redirect in redirects)


def assign(shell: Shell, assignment: Assignment) -> None:
    """Run an assignment ``x=...`` in any of its forms."""
    other = None
    if shell.reading.inner is None:
        shell.reading.executed.add(assignment.span.start)
        other = shell.reading.replaced.get(assignment.span.start)
    if isinstance(assignment.value, tuple):
        _assign_array(shell, assignment)
        return
    text = assignment_text(shell, assignment) if other is None else literal(other)
    if assignment.index is not None:
        index = expansion.expand_text(shell, assignment.index)
        parameters.assign_element(
            shell, assignment.name, index.shown(), text, is_appending=assignment.is_appending
        )
        return
    if assignment.is_appending:
        before = shell.find(assignment.name)
        old = None if before is None else before.scalar()
        if (
            before is not None
            and before.is_integer
            and old is not None
            and old.is_known
            and text.is_known
        ):
            text = literal(f"{old.shown()}+({text.shown()})")
        else:
            text = text if old is None else old + text
    result = shell.find(assignment.name)
    if result is not None and result.is_integer and text.is_known:
        text = expansion.arithmetic(
            shell,
            Word((Literal(text.shown(), is_quoted=True),), text.shown(), assignment.span),
            text.shown(),
        )
    shell.assign(assignment.name, text)


def assignment_text(shell: Shell, assignment: Assignment) -> Text:
    return (
        expansion.expand_text(shell, assignment.value)
        if isinstance(assignment.value, Word)
        else Text()
    )


def _assign_array(shell: Shell, assignment: Assignment) -> None:
    """Assign ``name=(a b [key]=c)``; elements with a key are set after the others."""
    assert isinstance(assignment.value, tuple)
    before = shell.find(assignment.name)
    is_associative = before is not None and before.is_associative
    elements: dict[int | str, Field] = {}
    if assignment.is_appending and before is not None:
        elements.update(
            before.elements
            or ({} if before.text is None else {0: Field(before.text, before.text.raw())})
        )
    following = max((key for key in elements if isinstance(key, int)), default=-1) + 1
    pending: list[tuple[Word, Word]] = []
    for element in assignment.value:
        if element.key is not None:
            pending.append((element.key, element.word))
            continue
        for field in expansion.expand_words(shell, [element.word]):
            elements[following] = field
            following += 1
    variable = shell.variable(assignment.name)
    shell_variable = Variable(
        elements=elements, is_associative=is_associative, is_exported=variable.is_exported
    )
    for scope in reversed(shell.scopes):
        if assignment.name in scope:
            scope[assignment.name] = shell_variable
            break
    for key, word in pending:
        index = expansion.expand_text(shell, key)
        parameters.assign_element(
            shell, assignment.name, index.shown(), expansion.expand_text(shell, word)
        )
