"""``x=...`` in all its forms."""

from temper_legacy_shim.scripts import expansion, parameters
from temper_legacy_shim.scripts.state import Shell
from temper_legacy_shim.scripts.tree import Assignment, Literal, Word
from temper_legacy_shim.scripts.values import Field, Text, Variable, literal


def assign(shell: Shell, assignment: Assignment) -> None:
    """``x=...`` in all its forms."""
    if shell.reading.inner is None:
        shell.reading.executed.add(assignment.span.start)
    if isinstance(assignment.value, tuple):
        _assign_array(shell, assignment)
        return
    text = assignment_text(shell, assignment)
    if assignment.index is not None:
        index = expansion.expand_text(shell, assignment.index)
        parameters.assign_element(shell, assignment.name, index.shown(), text, is_appending=assignment.is_appending)
        return
    if assignment.is_appending:
        before = shell.find(assignment.name)
        old = None if before is None else before.scalar()
        if before is not None and before.is_integer and old is not None and old.is_known and text.is_known:
            text = literal(f"{old.shown()}+({text.shown()})")
        else:
            text = text if old is None else old + text
    found = shell.find(assignment.name)
    if found is not None and found.is_integer and text.is_known:
        text = expansion.arithmetic(shell, Word((Literal(text.shown(), is_quoted=True),), text.shown(), assignment.span), text.shown())
    shell.assign(assignment.name, text)


def assignment_text(shell: Shell, assignment: Assignment) -> Text:
    """What is assigned, where that is no array."""
    return expansion.expand_text(shell, assignment.value) if isinstance(assignment.value, Word) else Text()


def _assign_array(shell: Shell, assignment: Assignment) -> None:
    assert isinstance(assignment.value, tuple)
    before = shell.find(assignment.name)
    is_associative = before is not None and before.is_associative
    elements: dict[int | str, Field] = {}
    if assignment.is_appending and before is not None:
        elements.update(before.elements or ({} if before.text is None else {0: Field(before.text, before.text.raw())}))
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
    shell_variable = Variable(elements=elements, is_associative=is_associative, is_exported=variable.is_exported)
    for scope in reversed(shell.scopes):
        if assignment.name in scope:
            scope[assignment.name] = shell_variable
            break
    for key, word in pending:
        index = expansion.expand_text(shell, key)
        parameters.assign_element(shell, assignment.name, index.shown(), expansion.expand_text(shell, word))
