"""Walk the tree of a script: compute known values, and record the commands that would run."""

import contextlib

from temper_legacy_shim.bash.execution import commands, conditions
from temper_legacy_shim.bash.syntax.syntax_tree import (
    Block,
    Calculation,
    Case,
    Command,
    CountingFor,
    For,
    Function,
    If,
    Item,
    Loop,
    Pipeline,
    Program,
    Redirected,
    Simple,
    Span,
    Test,
)
from temper_legacy_shim.bash.values import expansion
from temper_legacy_shim.bash.values.patterns import TooMuch, compiled, matches
from temper_legacy_shim.bash.values.shell_state import Exit, Jump, Reading, Return, Shell, Stopped
from temper_legacy_shim.bash.values.shell_values import Text, Truth

MAX_ROUNDS = 500


def run_script(program: Program, reading: Reading) -> Shell:
    """Walk a script, and record the commands it would run."""
    shell = Shell(reading, _INTERPRETER)
    run_isolated(shell, program)
    return shell


def run_isolated(shell: Shell, program: Program) -> None:
    """Run a program as a separate shell, so that an exit ends only that shell."""
    try:
        run(shell, program)
    except (Exit, Return, Jump, Stopped):
        return


def run(shell: Shell, program: Program) -> None:
    for item in program.items:
        _run_item(shell.fork() if item.is_background else shell, item)


def _run_item(shell: Shell, item: Item) -> None:
    was = shell.reading.item
    shell.reading.item = item.span if shell.reading.inner is None else was
    try:
        for operator, pipeline in item.pipelines:
            if operator:
                truth = shell.status if shell.status is None else shell.status == 0
                # Unknown statuses count as success, except those of tests, which were decided.
                is_true = True if truth is None else truth
                if is_true != (operator == "&&"):
                    continue
            _run_pipeline(shell, pipeline, is_tested=len(item.pipelines) > 1)
    except (Exit, Stopped):
        if item.is_background:
            return
        raise
    finally:
        shell.reading.item = was


def _run_pipeline(shell: Shell, pipeline: Pipeline, *, is_tested: bool = False) -> None:
    if len(pipeline.commands) == 1:
        run_command(shell, pipeline.commands[0], is_tested=is_tested)
    else:
        _run_pipes(shell, pipeline)
    if pipeline.is_negated and shell.status is not None:
        shell.status = int(shell.status == 0)


def _run_pipes(shell: Shell, pipeline: Pipeline) -> None:
    """Run each command of a pipe in a subshell, with the output of the previous one as input."""
    printed: Text | None = shell.stdin
    for number, command in enumerate(pipeline.commands):
        child = shell.fork()
        child.stdin = printed
        is_last = number == len(pipeline.commands) - 1
        child.captured = shell.captured if is_last and shell.captured is not None else Text()
        with contextlib.suppress(Exit, Return, Stopped):
            run_command(child, command)
        printed = child.captured
        if is_last:
            shell.status = child.status
            if shell.captured is not None:
                shell.captured = printed


def run_command(shell: Shell, command: Command, *, is_tested: bool = False) -> None:
    shell.reading.step()
    match command:
        case Simple():
            commands.run_simple(shell, command, is_tested=is_tested)
        case Redirected():
            _run_redirected(shell, command)
        case Block(is_subshell=True):
            _run_subshell(shell, command.body)
        case Block():
            run(shell, command.body)
        case If():
            _run_if(shell, command)
        case For():
            _run_for(shell, command)
        case CountingFor():
            _run_counting_for(shell, command)
        case Loop():
            _run_loop(shell, command)
        case Case():
            _run_case(shell, command)
        case Function():
            shell.functions[command.name] = command.body
            if shell.reading.inner is None:
                shell.reading.inner_functions.discard(command.name)
            else:
                shell.reading.inner_functions.add(command.name)
            shell.status = 0
        case Test():
            shell.status = _test_status(shell, command, is_decided=is_tested)
        case Calculation():
            word = command.expression
            known = expansion.arithmetic(shell, word, word.source).known
            shell.status = None if known is None else int(int(known) == 0)


def _run_subshell(shell: Shell, body: Program) -> None:
    child = shell.fork()
    child.captured = shell.captured
    run_isolated(child, body)
    shell.status, shell.captured = child.status, child.captured


def _run_redirected(shell: Shell, command: Redirected) -> None:
    stdin, captured = shell.stdin, shell.captured
    given = commands.stdin_of(shell, command.redirects)
    shell.stdin = given if given is not None else stdin
    is_elsewhere = commands.prints_elsewhere(command.redirects)
    if is_elsewhere and captured is not None:
        shell.captured = Text()
    try:
        run_command(shell, command.command)
    finally:
        shell.stdin = stdin
        if is_elsewhere:
            shell.captured = captured


# --- conditions
# --------------------------------------------------------------------------------------------------


def _test_status(shell: Shell, command: Test, *, is_decided: bool) -> int | None:
    try:
        truth = conditions.test_words(shell, command)
    except conditions.Malformed:
        return 2
    return truth_status(shell, truth, command.span, is_decided=is_decided)


def truth_status(shell: Shell, truth: Truth, span: Span, *, is_decided: bool) -> int | None:
    """Return a test's status, decided now if a list depends on it, else at the first use."""
    if truth.value is not None and not truth.is_assumed:
        return int(not truth.value)
    if not is_decided:
        shell.pending = truth
        return None if truth.value is None else int(not truth.value)
    taken = shell.reading.decide(
        span,
        _written(shell, span),
        usual=int(bool(truth.value)),
        is_assumed=truth.value is not None,
    )
    return int(not taken)


def _written(shell: Shell, span: Span) -> str:
    if shell.reading.inner is not None:
        span = shell.reading.inner
    return " ".join(shell.reading.text[span.start : span.end].split())[:160]


def _decided(shell: Shell, condition: Program, *, usual: int | None = None) -> bool:
    """Evaluate a condition; a decision is recorded if the text leaves it open."""
    shell.take_pending()
    run(shell, condition)
    truth = shell.take_pending()
    status = shell.status
    if status is not None and truth is None:
        return status == 0
    if truth is not None:
        is_negated = truth.value is not None and status is not None and (status == 0) != truth.value
        value = None if truth.value is None else truth.value != is_negated
        default = int(bool(value)) if usual is None or value is not None else usual
    else:
        # A command that a reader does not know is taken to succeed.
        value, default = None, 1 if usual is None else usual
    span = condition.span
    return bool(
        shell.reading.decide(
            span, _written(shell, span), usual=default, is_assumed=value is not None
        )
    )


def _run_if(shell: Shell, command: If) -> None:
    for condition, body in command.branches:
        if condition is None or _decided(shell, condition):
            run(shell, body)
            return
    shell.status = 0


def _run_case(shell: Shell, command: Case) -> None:
    """Run the branch that matches.

    If the word is unknown, the reading decides, and takes the branch ``*`` by default. A word of
    unset variables is empty, but it can be decided otherwise.
    """
    case_word = expansion.expand_text(shell, command.case_word)
    chosen: int | None = None
    if case_word.is_known or case_word.is_unset:
        chosen = _matching_branch(shell, command, case_word.if_unset())
    if chosen is None or case_word.is_unset:
        star = next(
            (
                number
                for number, branch in enumerate(command.branches, 1)
                if branch[0][0].literal() == "*"
            ),
            0,
        )
        usual = star if chosen is None else chosen
        span = Span(command.span.start, command.case_word.span.end)
        chosen = shell.reading.decide(
            span,
            _written(shell, span),
            usual=usual,
            num_choices=len(command.branches) + 1,
            is_assumed=case_word.is_unset,
        )
    shell.status = 0
    while 0 < chosen <= len(command.branches):
        _, body, operator = command.branches[chosen - 1]
        run(shell, body)
        if operator == ";&":
            chosen += 1
        elif operator == ";;&" and (case_word.is_known or case_word.is_unset):
            chosen = _matching_branch(shell, command, case_word.if_unset(), after=chosen) or 0
        else:
            return


def _matching_branch(shell: Shell, command: Case, case_word: str, *, after: int = 0) -> int | None:
    """Return the number of the next branch that fits: 0 for none, None if that is unknown."""
    for number, (patterns, _, _) in enumerate(command.branches[after:], after + 1):
        for pattern in patterns:
            pieces, is_known, is_unset = expansion.expand_pattern(shell, pattern)
            if not (is_known or is_unset):
                return None
            try:
                if matches(compiled(pieces), case_word):
                    return number
            except TooMuch:
                return None
    return 0


# --- loops
# --------------------------------------------------------------------------------------------------


def _run_for(shell: Shell, command: For) -> None:
    fields = (
        shell.arguments() if command.words is None else expansion.expand_words(shell, command.words)
    )
    shell.status = 0
    for number, field in enumerate(fields):
        if number >= MAX_ROUNDS:
            shell.reading.note(
                f"only the first {MAX_ROUNDS} rounds of the loop over {command.name} were read",
                command.span.start,
            )
            return
        shell.assign(command.name, field.text)
        if not _run_round(shell, command.body):
            return


def _run_round(shell: Shell, body: Program) -> bool:
    """Return one round; False if the loop ends."""
    try:
        run(shell, body)
    except Jump as jump:
        if jump.levels > 1:
            raise Jump(is_break=jump.is_break, levels=jump.levels - 1) from None
        return not jump.is_break
    return True


def _run_counting_for(shell: Shell, command: CountingFor) -> None:
    expansion.arithmetic(shell, command.start, command.start.source)
    for _ in range(MAX_ROUNDS):
        known = expansion.arithmetic(shell, command.condition, command.condition.source).known
        if known is None or (known == "0" and command.condition.source.strip()):
            if known is None:
                what = (
                    f"the loop for (({command.condition.source.strip()})) was not read: its end "
                    "is not known"
                )
                shell.reading.note(what, command.span.start)
            return
        if not _run_round(shell, command.body):
            return
        expansion.arithmetic(shell, command.step, command.step.source)
    shell.reading.note(
        f"only the first {MAX_ROUNDS} rounds of a loop were read", command.span.start
    )


def _run_loop(shell: Shell, command: Loop) -> None:
    for _ in range(MAX_ROUNDS):
        num_decisions = len(shell.reading.decisions)
        holds = _decided(shell, command.condition, usual=int(command.is_until))
        if holds == command.is_until or not _run_round(shell, command.body):
            shell.status = 0
            return
        if len(shell.reading.decisions) > num_decisions:
            shell.reading.note(
                "a loop whose end is not known was read for one round", command.span.start
            )
            return
    shell.reading.note(
        f"only the first {MAX_ROUNDS} rounds of a loop were read", command.span.start
    )


class _Evaluator:
    """Implements ``Interpreter`` with the functions of this package."""

    expand_text = staticmethod(expansion.expand_text)
    expand_pattern = staticmethod(expansion.expand_pattern)
    expand_fragments = staticmethod(expansion.fragments)
    calculate = staticmethod(expansion.arithmetic)
    run = staticmethod(run)
    run_isolated = staticmethod(run_isolated)
    run_command = staticmethod(run_command)
    truth_status = staticmethod(truth_status)


_INTERPRETER = _Evaluator()
