"""Grammar of bash, from a text to a ``Program``; syntax errors are a ``ScriptError``."""

import re

from temper_legacy_shim.bash.execution.simple_commands import SimpleCommands
from temper_legacy_shim.bash.syntax.lexer import NAME
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
    Literal,
    Loop,
    Pipeline,
    Program,
    Redirected,
    Simple,
    Span,
    Test,
    Word,
)

_FUNCTION = re.compile(r"([^\s;&|<>()$`\"'#{}=\\][^\s;&|<>()$`\"'=\\]*)[ \t]*\([ \t]*\)")
_COPROCESS = re.compile(r"coproc[ \t]+(?:[A-Za-z_]\w*[ \t]+(?=[({]))?")
_ENDS = ("then", "do", "done", "fi", "elif", "else", "esac", "}")


def parse(text: str) -> Program:
    """Return the tree of a script.

    Raises:
        ScriptError: bash would not run it; names the line.
    """
    text = text.removeprefix("\ufeff").replace("\0", "")
    return Parser(text).program_until("")


class Parser(SimpleCommands):
    def program_until(self, end: str) -> Program:
        """Return the commands up to ``end``, which is consumed, or to the end of the text."""
        start = self.at
        program = self._program(())
        self.skip(newlines=True)
        if end and self.peek() != end:
            raise self.error(
                f"{self.here()} where {end!r} should close what was opened.",
                None if self.peek() else start,
            )
        if not end and self.peek():
            raise self.error(f"{self.here()} where a command should begin.")
        self.at += len(end)
        return program

    def _program(self, ends: tuple[str, ...]) -> Program:
        self.skip(newlines=True)
        start, items = self.at, []
        while self.peek() and self.peek() != ")" and self.peek(2) != ";;" and self.peek(2) != ";&":
            word = self.reserved()
            if word in ends:
                break
            if word in _ENDS:
                raise self.error(f"{word!r} has nothing to close here.")
            items.append(self._item())
            self.skip(newlines=True)
        return Program(tuple(items), Span(start, items[-1].span.end if items else start))

    def _item(self) -> Item:
        start, pipelines, operator = self.at, [], ""
        while True:
            pipelines.append((operator, self._pipeline()))
            self.skip()
            operator = self.peek(2)
            if operator not in ("&&", "||"):
                break
            self.at += 2
            self.skip(newlines=True)
        end = self.at
        char = self.peek()
        is_background = char == "&"
        if char == "&" or (char == ";" and self.peek(2) not in (";;", ";&")):
            self.at += 1
        elif char not in ("", "\n", ")", ";"):
            raise self.error(f"{self.here()} after a command.")
        return Item(tuple(pipelines), is_background, Span(start, end))

    def _pipeline(self) -> Pipeline:
        start, commands, is_negated = self.at, [], False
        while self.reserved() == "!":
            self.at += 1
            is_negated = not is_negated
            self.skip()
        if self.reserved() == "time":
            self.at += 4
            self.skip()
            if self.reserved() == "-p":
                self.at += 2
                self.skip()
        while True:
            commands.append(self._command())
            end = self.at
            self.skip()
            if self.peek() != "|" or self.peek(2) == "||":
                return Pipeline(tuple(commands), is_negated, Span(start, end))
            self.at += 2 if self.peek(2) == "|&" else 1
            self.skip(newlines=True)

    # --- commands
    # ----------------------------------------------------------------------------------------------

    def _command(self) -> Command:
        self.nest()
        start = self.at
        command = self._one_command()
        self.nesting -= 1
        if isinstance(command, Simple | Function):
            return command
        redirects = []
        while True:
            self.skip()
            redirect = self.redirect()
            if redirect is None:
                break
            redirects.append(redirect)
        return (
            Redirected(command, tuple(redirects), Span(start, redirects[-1].span.end))
            if redirects
            else command
        )

    def _one_command(self) -> Command:
        """Parse one command; ``((`` that is no calculation opens a subshell inside a subshell."""
        start, word = self.at, self.reserved()
        if self.peek(2) == "((":
            self.at += 2
            expression = self.calculation()
            if expression is not None:
                return Calculation(expression, Span(start, self.at))
            self.at = start
        if self.peek() == "(":
            self.at += 1
            return Block(self.program_until(")"), True, Span(start, self.at))
        if word == "{":
            self.at += 1
            body = self._program(("}",))
            self.expect("}")
            return Block(body, False, Span(start, self.at))
        if word == "[[":
            return self._test()
        if word == "if":
            return self._if()
        if word in ("while", "until"):
            self.at += 5
            condition = self._program(("do",))
            return Loop(condition, self._body(), word == "until", Span(start, self.at))
        if word in ("for", "select"):
            self.at += len(word)
            return self._for(start)
        if word == "case":
            return self._case()
        if (coprocess := _COPROCESS.match(self.text, self.at)) is not None:
            self.at = coprocess.end()
            return self._command()
        if word == "function":
            return self._function_with_word()
        match = _FUNCTION.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
            self.skip(newlines=True)
            return Function(match[1], self._command(), Span(start, self.at))
        return self.simple()

    def _if(self) -> If:
        start, branches = self.at, []
        self.at += 2
        while True:
            condition = self._program(("then",))
            self.expect("then")
            branches.append((condition, self._program(("elif", "else", "fi"))))
            word = self.reserved()
            self.at += len(word)
            if word == "fi":
                return If(tuple(branches), Span(start, self.at))
            if word == "else":
                body = self._program(("fi",))
                self.expect("fi")
                return If((*branches, (None, body)), Span(start, self.at))
            if word != "elif":
                raise self.error("'if' is opened here and never closed by 'fi'.", start)

    def _body(self) -> Program:
        self.skip(newlines=True)
        if self.reserved() == "{":
            self.at += 1
            body = self._program(("}",))
            self.expect("}")
            return body
        self.expect("do")
        body = self._program(("done",))
        self.expect("done")
        return body

    def _for(self, start: int) -> Command:
        self.skip()
        if self.peek(2) == "((":
            return self._counting_for(start)
        match = NAME.match(self.text, self.at)
        if match is None:
            raise self.error(f"{self.here()} where 'for' should be followed by a name.")
        self.at = match.end()
        self.skip(newlines=True)
        words: tuple[Word, ...] | None = None
        if self.reserved() == "in":
            self.at += 2
            words = self.words()
        self.skip_separator()
        return For(match[0], words, self._body(), Span(start, self.at))

    def _counting_for(self, start: int) -> CountingFor:
        self.at += 2
        inside = self.at
        full = self.calculation()
        if full is None or full.source.count(";") != 2:
            raise self.error("'for ((' needs three expressions with ';' between them.", inside)
        end = self.at
        expressions = []
        for piece in full.source.split(";"):
            part = Parser(piece + "))")
            part.nesting = self.nesting
            expressions.append(part.calculation() or Word((), piece, Span(0, 0)))
        self.at = end
        self.skip_separator()
        first, second, third = expressions
        return CountingFor(first, second, third, self._body(), Span(start, self.at))

    def _case(self) -> Case:
        start = self.at
        self.at += 4
        self.skip()
        case_word = self.word()
        self.skip(newlines=True)
        self.expect("in")
        branches: list[tuple[tuple[Word, ...], Program, str]] = []
        while True:
            self.skip(newlines=True)
            if self.reserved() == "esac":
                self.at += 4
                return Case(case_word, tuple(branches), Span(start, self.at))
            if not self.peek():
                raise self.error("'case' is opened here and never closed by 'esac'.", start)
            branches.append(self._case_branch())

    def _case_branch(self) -> tuple[tuple[Word, ...], Program, str]:
        """Parse ``pattern | pattern) commands ;;`` and return its three parts."""
        if self.peek() == "(":
            self.at += 1
        patterns = []
        while True:
            self.skip()
            patterns.append(self._pattern())
            self.skip()
            char = self.peek()
            self.at += 1
            if char == ")":
                break
            if char != "|":
                raise self.error("a pattern of 'case' is not closed by ')'.", self.at - 1)
        body = self._program(("esac",))
        operator = ""
        for operator in (";;&", ";;", ";&", ""):
            if self.text.startswith(operator, self.at):
                self.at += len(operator)
                break
        if not operator and self.reserved() != "esac":
            raise self.error(f"{self.here()} where ';;' or 'esac' should be.")
        return tuple(patterns), body, operator

    def _pattern(self) -> Word:
        word = self.word()
        # An extended pattern has parentheses: @(a|b).
        while word.source.endswith(("@", "?", "*", "+", "!")) and self.peek() == "(":
            start = word.span.start
            depth, end = 0, self.at
            while end < len(self.text):
                depth += (self.text[end] == "(") - (self.text[end] == ")")
                end += 1
                if depth == 0:
                    break
            self.at = end
            word = Word(
                (Literal(self.text[start:end], is_quoted=False),),
                self.text[start:end],
                Span(start, end),
            )
        if not word.source:
            raise self.error(f"{self.here()} where a pattern should be.")
        return word

    def _function_with_word(self) -> Function:
        start = self.at
        self.at += len("function")
        self.skip()
        match = re.compile(r"[^\s;&|<>()$`\"'\\]+").match(self.text, self.at)
        if match is None:
            raise self.error(f"{self.here()} where 'function' should be followed by a name.")
        self.at = match.end()
        self.skip()
        if parentheses := re.compile(r"\([ \t]*\)").match(self.text, self.at):
            self.at = parentheses.end()
        self.skip(newlines=True)
        return Function(match[0], self._command(), Span(start, self.at))

    def _test(self) -> Test:
        """Read ``[[ ... ]]``: operators as text, operands as words."""
        start = self.at
        self.at += 2
        tokens: list[str | Word] = []
        while True:
            self.skip(newlines=True)
            if self.reserved() == "]]":
                self.at += 2
                return Test(tuple(tokens), Span(start, self.at))
            operator = re.compile(r"&&|\|\||[()<>]").match(self.text, self.at)
            if operator is not None and not (tokens and tokens[-1] == "=~"):
                tokens.append(operator[0])
                self.at = operator.end()
                continue
            if not self.peek():
                raise self.error("'[[' is opened here and never closed by ']]'.", start)
            tokens.append(
                self._test_word(is_pattern=bool(tokens) and tokens[-1] in ("=~", "==", "=", "!="))
            )

    def _test_word(self, *, is_pattern: bool) -> str | Word:
        """Parse a word of ``[[ ]]``, and return an operator as text.

        Parentheses and what stands between them belong to a pattern, such as ``=~ (a|b)``.
        """
        depth = 0

        def is_end(char: str) -> bool:
            nonlocal depth
            if char in " \t\n" or (char in ";&|<>()" and not is_pattern):
                return True
            depth += (char == "(") - (char == ")")
            return depth < 0 or (char in "&|<>;" and depth == 0)

        word = self.word(is_end)
        if not word.source:
            raise self.error(f"{self.here()} inside '[[ ... ]]'.")
        literal = word.literal()
        operators = (
            "!",
            "=",
            "==",
            "!=",
            "=~",
            "-eq",
            "-ne",
            "-lt",
            "-le",
            "-gt",
            "-ge",
            "-nt",
            "-ot",
            "-ef",
        )
        return literal if literal in operators else word
