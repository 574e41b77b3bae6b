"""Hide the values of secrets in messages: exceptions of user code may quote what they were given.

A value is a secret if it is that of an environment variable with the name of a secret, or of a
setting that `register_secrets` was told about. Standard library only.
"""

import json
import logging
import math
import os
import re
import sys
import traceback
from base64 import b64encode
from collections.abc import Iterable
from functools import lru_cache
from types import TracebackType
from urllib.parse import quote

from temper_trainer.terminal_text import escape_control_characters

HIDDEN = "<hidden>"
MIN_SECRET_CHARS = 8
"""Minimum characters of a secret that is found by its value; shorter ones match by chance."""
_MIN_REGISTERED_CHARS = 6
"""The same for settings, which are fewer than environment variables."""

_SECRET_VARIABLE = re.compile(
    r"((token|key|secret|password|passphrase|credential|webhook)s?|passwd|jwt"
    r"|(^|_)(auth|authorization|bearer|cookies?|dsn|pass|pat|pwd))[0-9]*(_|$)",
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

_TO_URLSAFE = str.maketrans("+/", "-_")
"""Translation of the standard characters of base64 to those for URLs."""

_LINE_BREAKS = re.compile(r"(?:[\r\n]|\\[rn])+")
"""Line breaks within a text that was wrapped, as MIME does with base64; also in Python's quotes."""

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
        # A path to a file of secrets is none.
        if is_secret_variable(name) and len(value) >= MIN_SECRET_CHARS and not os.path.exists(value)
    }


def register_secrets(values: Iterable[str]) -> None:
    """Let `redact_secrets` hide these values until this process ends; skip very short ones."""
    _registered.update(value for value in values if len(value) >= _MIN_REGISTERED_CHARS)


def list_registered_secrets() -> list[str]:
    """Return the values that `register_secrets` was given, for a process that this one starts."""
    return sorted(_registered)


def redact_secrets(text: str) -> str:
    """Return a text with the values of secrets hidden, also in quotes, in URLs and in base64.

    A secret that is wrapped over lines is hidden as well.

    Example:
        >>> os.environ["DOC_API_KEY"] = "value of the key"
        >>> redact_secrets("401 for https://judge?k=value%20of%20the%20key")
        '401 for https://judge?k=<hidden>'
        >>> del os.environ["DOC_API_KEY"]
    """
    secrets = _registered.union(list_secret_variables().values())
    forms = {form for secret in secrets for form in list_secret_forms(secret)}
    # Longest first, because one may be part of another.
    ordered = sorted(forms, key=len, reverse=True)
    for form in ordered:
        text = text.replace(form, HIDDEN)
    joined = _LINE_BREAKS.sub("", text)
    for form in ordered:
        if form in joined:
            wrapped = f"(?:{_LINE_BREAKS.pattern})?".join(re.escape(char) for char in form)
            text = re.sub(wrapped, HIDDEN, text)
    return text


@lru_cache(maxsize=256)
def list_secret_forms(secret: str) -> frozenset[str]:
    """Return the texts in which a secret may appear: as it is, quoted, in a URL and in base64.

    Base64 of a longer text, such as ``user:token``, has one of three forms of the token, according
    to the number of bytes before it.

    Example:
        >>> sorted(list_secret_forms("my_token"))
        ['15X3Rva2Vu', 'bXlfdG9rZW', 'bXlfdG9rZW4', 'my_token', 'teV90b2tlb', 'teV90b2tlbg']
    """
    data = secret.encode(errors="surrogateescape")
    encoded = set()
    for num_before in range(3):
        # A base64 character encodes 6 bits. Leave out characters with bits of the preceding bytes.
        start = math.ceil(num_before * 8 / 6)
        text = b64encode(b"\0" * num_before + data).decode().rstrip("=")
        # The last character depends on the next byte, unless the text ends with the secret.
        for form in (text[start:], text[start : (num_before + len(data)) * 8 // 6]):
            encoded |= {form, form.translate(_TO_URLSAFE)}
    return frozenset(
        {
            *(secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]),
            *(quote(secret), quote(secret, safe="")),
            *encoded,
            *(quote(form, safe="") for form in encoded),
        }
    )


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


def print_redacted_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception as the interpreter does; for `sys.excepthook`."""
    lines = traceback.format_exception(kind, error, trace)
    sys.stderr.write(escape_control_characters(redact_secrets("".join(lines))))
