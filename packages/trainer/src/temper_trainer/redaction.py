"""Hide the values of secrets in messages: exceptions of user code may quote what they were given.

Three kinds of values are secrets: values of environment variables whose name says so, settings that
were passed to `register_secrets`, and passwords in a URL or connection string in any environment
variable. Control characters in the messages are escaped, because in a terminal they can clear the
screen, change the window's title, or hide lines. Standard library only.
"""

import html
import json
import logging
import math
import os
import re
import sys
import traceback
from base64 import b32encode, b64encode
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import TracebackType
from typing import TextIO
from urllib.parse import quote, unquote

HIDDEN = "<hidden>"
MIN_SECRET_CHARS = 8
"""Minimum characters of a secret that is found by its value; shorter ones match by chance."""
_MIN_REGISTERED_CHARS = 6
"""Minimum characters of a registered setting. There are fewer of these than environment variables,
so that matches by chance are rarer."""

_SECRET_VARIABLE = re.compile(
    r"((token|key|secret|password|passphrase|credential|webhook)s?|passwd|jwt"
    r"|conn(ection)?_?str(ing)?s?"
    r"|(^|_)(auth|authorization|bearer|cookies?|dsn|(ssh)?pass|pat|pwd))[0-9]*(_|$)",
    re.IGNORECASE,
)
"""Name of an environment variable whose value is a secret. The pattern matches more names than the
rule for configuration keys does. A false match does little harm: the config contains
`${oc.env:NAME}` in place of the value.
"""
_WORKING_DIRECTORY = ("PWD", "OLDPWD")
"""Variables whose values are no secrets and must be written, because a resume may be started in
another directory.
"""

PASSWORD_IN_URL = re.compile(r"://(?!\$\{[^{}]*\}@)[^/\s:@]*:([^/\s@]+)@")
_PASSWORD_IN_CONNECTION_STRING = re.compile(
    r"(?:^|;)\s*(?:AccountKey|SharedAccessKey|SharedAccessSignature|Password|Pwd)\s*=\s*([^;]+)",
    re.IGNORECASE,
)
"""A password as in `AccountName=NAME;AccountKey=KEY` of Azure and in those of databases."""

_TO_URLSAFE = str.maketrans("+/", "-_")
"""Translates standard base64 characters to the URL-safe ones."""

_INTERRUPTION = r"(?:[\r\n]|\\{1,16}[rn]|\x1b\[[0-9;:]*[A-Za-z])+"
"""Text that may be inside a secret: line breaks, as MIME wraps base64, also in Python's quotes, and
terminal color codes. Repetitions are bounded, because a text may consist of backslashes.
"""
_INTERRUPTIONS = re.compile(_INTERRUPTION)
"""Matches each such text."""
_CODE_POINT = re.compile(r"\\{1,16}(?:u([0-9a-f]{4})|x([0-9a-f]{2}))", re.IGNORECASE)
"""A character as JSON and Python quote it."""
_HTML_NAMES = {"&": ("amp",), "<": ("lt",), ">": ("gt",), '"': ("quot",), "'": ("apos",)}
_MAX_QUOTINGS = 4
"""Maximum number of times that quoting is undone; a URL in a URL is quoted twice."""

_registered: set[str] = set()
"""Secrets of this process's configurations."""


def is_secret_variable(name: str) -> bool:
    """Return True if the name of an environment variable says that its value is a secret."""
    return name not in _WORKING_DIRECTORY and _SECRET_VARIABLE.search(name) is not None


def list_secret_variables() -> dict[str, str]:
    """Return the environment variables whose names say that they are secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        # The path of a file with secrets is no secret.
        if is_secret_variable(name) and len(value) >= MIN_SECRET_CHARS and not os.path.exists(value)
    }


@lru_cache(maxsize=1024)
def _find_passwords(text: str) -> frozenset[str]:
    """Return the passwords in the URLs and connection strings of a text, as written and decoded.

    Example:
        >>> sorted(_find_passwords("postgres://bob:hunter%402@db"))
        ['hunter%402', 'hunter@2']
    """
    passwords = {*PASSWORD_IN_URL.findall(text), *_PASSWORD_IN_CONNECTION_STRING.findall(text)}
    passwords.update([unquote(password) for password in passwords])
    return frozenset(password for password in passwords if len(password) >= MIN_SECRET_CHARS)


def register_secrets(values: Iterable[str]) -> None:
    """Let `redact_secrets` hide these values until this process ends; skip very short ones."""
    _registered.update(value for value in values if len(value) >= _MIN_REGISTERED_CHARS)


def list_registered_secrets() -> list[str]:
    """Return the registered secrets, to pass them to a child process."""
    return sorted(_registered)


def redact_secrets(text: str) -> str:
    """Return a text with the values of secrets hidden.

    A secret is hidden as it is, quoted (Python, JSON, URL, HTML; also partly or more than once), in
    hexadecimal, base32 and base64, and each of these also with line breaks or color codes inside.

    Example:
        >>> os.environ["DOC_API_KEY"] = "value of the key"
        >>> redact_secrets("401 for https://judge?k=value%20of%20the%20key")
        '401 for https://judge?k=<hidden>'
        >>> del os.environ["DOC_API_KEY"]
    """
    if len(text) < _MIN_REGISTERED_CHARS:
        return text
    secrets = _registered.union(
        list_secret_variables().values(), *map(_find_passwords, os.environ.values())
    )
    forms = {form for secret in secrets for form in list_secret_forms(secret)}
    # Longest first, because one may be part of another.
    ordered = sorted(forms, key=len, reverse=True)
    for form in ordered:
        if form in text:
            text = text.replace(form, HIDDEN)
    joined = _INTERRUPTIONS.sub("", text)
    if joined != text:
        for form in ordered:
            if form in joined:
                text = re.sub(f"(?:{_INTERRUPTION})?".join(map(re.escape, form)), HIDDEN, text)
    plain = _unquote(text)
    for secret in sorted(secrets, key=len, reverse=True):
        if _unquote_secret(secret) in plain:
            text = _quoted_pattern(secret).sub(HIDDEN, text)
    return text


@lru_cache(maxsize=256)
def list_secret_forms(secret: str) -> frozenset[str]:
    """Return texts in which a secret may appear: as it is, quoted, and in hex, base32 and base64.

    In the base64 of a longer text, such as ``user:token``, the token has one of three forms,
    depending on the number of bytes before it. In base32 it has one of five forms.

    Example:
        >>> sorted(list_secret_forms("my_token"))[:4]
        ['15X3Rva2Vu', '26K7ORXWWZLO', '3LZL52G623FN', '3LZL52G623FNY']
    """
    data = secret.encode(errors="surrogateescape")
    encoded = {data.hex(), data.hex().upper()}
    for num_before in range(3):
        for form in _list_encodings(b64encode, data, num_before=num_before, bits=6):
            encoded |= {form, form.translate(_TO_URLSAFE)}
    for num_before in range(5):
        encoded |= _list_encodings(b32encode, data, num_before=num_before, bits=5)
    return frozenset(
        {
            *(secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]),
            *(quote(secret), quote(secret, safe="")),
            *encoded,
            *(quote(form, safe="") for form in encoded),
        }
    )


def _list_encodings(
    encode: Callable[[bytes], bytes], data: bytes, *, num_before: int, bits: int
) -> set[str]:
    """Return how base64 or base32 encodes `data` if `num_before` other bytes are before it.

    Leave out the characters that depend on bytes before or after the data.

    Args:
        encode: The encoding.
        data: The bytes of a secret.
        num_before: Number of bytes before the data, modulo the bytes that are encoded together.
        bits: Bits per character of the encoding.
    """
    start = math.ceil(num_before * 8 / bits)
    text = encode(b"\0" * num_before + data).decode().rstrip("=")
    # The last character depends on the byte after the data. If no byte follows, it is fixed.
    return {text[start:], text[start : (num_before + len(data)) * 8 // bits]}


@lru_cache(maxsize=1024)
def _unquote_secret(secret: str) -> str:
    return _unquote(secret)


def _unquote(text: str) -> str:
    """Return a text without the quoting that `_quoted_pattern` matches.

    A search in the result is fast. It shows whether the slow pattern is needed.
    """
    for _ in range(_MAX_QUOTINGS):
        before = text
        text = _INTERRUPTIONS.sub("", text)
        # In URLs, a plus sign may stand for a space.
        text = html.unescape(unquote(text.replace("+", " ")))
        text = _CODE_POINT.sub(lambda match: chr(int(match[1] or match[2], 16)), text)
        if text == before:
            break
    return text.replace("\\", "")


@lru_cache(maxsize=256)
def _quoted_pattern(secret: str) -> re.Pattern[str]:
    """Return a pattern for a secret in which any character may be quoted, once or more often."""
    return re.compile(f"(?:{_INTERRUPTION})?".join(_quoted_character(char) for char in secret))


def _quoted_character(char: str) -> str:
    code = ord(char)
    data = char.encode(errors="surrogateescape")
    entities = (*_HTML_NAMES.get(char, ()), f"#0*{code}", f"#x0*{code:x}")
    options = [
        # JSON and Python put a backslash before some characters.
        r"\\{1,16}" if char == "\\" else rf"\\{{0,16}}{re.escape(char)}",
        "".join(f"%(?:25)*(?i:{byte:02x})" for byte in data),
        f"&(?i:(?:amp;)*(?:{'|'.join(entities)}));",
        rf"\\{{1,16}}(?i:u{code:04x}|x{code:02x})",
    ]
    if char == " ":
        options.append(r"\+")
    return f"(?:{'|'.join(options)})"


class RedactingFormatter(logging.Formatter):
    """Formatter that hides secrets and escapes control characters, also in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return escape_control_characters(redact_secrets(super().format(record)))


def configure_logging() -> None:
    """Write warnings to stderr with `RedactingFormatter`, unless logging is configured already."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class RedactingStream:
    """A text stream that hides secrets in each text that is written to it.

    Everything else, such as `isatty`, `fileno` and `encoding`, comes from the original stream. A
    secret that is written in several pieces is not found, and neither is one that is written to the
    binary stream `buffer` or the descriptor.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without its secrets; return its character count."""
        self._stream.write(redact_secrets(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        if name == "_stream":  # not yet set, as in a copy
            raise AttributeError(name)
        return getattr(self._stream, name)


def redact_standard_streams() -> None:
    """Hide secrets in whatever this process prints; call it before other modules are imported.

    This covers output for which Python has no hook: exceptions in threads and finalizers of the
    user's code, warnings, and the log handlers of other libraries. Such a handler keeps the stream
    that exists when it is created.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # None in a process without a console.
        if stream is not None and not isinstance(stream, RedactingStream):
            setattr(sys, name, RedactingStream(stream))


def print_redacted_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception as the interpreter does; for `sys.excepthook`."""
    lines = traceback.format_exception(kind, error, trace)
    sys.stderr.write(escape_control_characters(redact_secrets("".join(lines))))


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    # Marks that change the direction of the text that follows.
    "\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Control characters other than line break and tab."""


def escape_control_characters(text: str) -> str:
    r"""Return the text with control characters as Python writes them; keeps line breaks and tabs.

    Example:
        >>> print(escape_control_characters("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    return _CONTROL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii").replace(r"\r", r"\x0d")
