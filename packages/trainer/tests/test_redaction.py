"""Values of secrets in messages."""

import html
import json
import logging
import math
import os
import re
import time
from base64 import b32encode, b64encode, encodebytes, urlsafe_b64encode
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from temper_trainer.redaction import (
    HIDDEN,
    RedactingFormatter,
    RedactingStream,
    print_redacted_traceback,
    redact_secrets,
    register_secrets,
)

SECRET = "a/'\\\"sentinel"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN2", SECRET)


@pytest.mark.parametrize(
    "form",
    [SECRET, repr(SECRET), json.dumps(SECRET), quote(SECRET), quote(SECRET, safe="")],
)
def test_value_of_a_secret_variable_is_hidden_in_each_form(form: str) -> None:
    redacted = redact_secrets(f"401 for key {form}.")
    assert "sentinel" not in redacted
    assert redacted.startswith("401 for key ")
    assert redacted.endswith(".")


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("DATABASE_URL", "postgres://bob:hunter2hunter2@db/x", "hunter2hunter2"),
        ("HTTPS_PROXY", "http://bob:hunter2%40hunter2@proxy:8080", "hunter2@hunter2"),
        ("PIP_INDEX_URL", "https://bob:hunter2%40hunter2@pypi/simple", "hunter2%40hunter2"),
        ("BROKERS", "amqp://a:short@b;amqp://c:hunter2hunter2@d", "hunter2hunter2"),
        ("STORAGE", "AccountName=bob;AccountKey=hunter2hunter2==;A=b", "hunter2hunter2=="),
        ("MYSQL", "Server=db;Password=hunter2hunter2", "hunter2hunter2"),
        ("SSHPASS", "hunter2hunter2", "hunter2hunter2"),
        ("AZURE_STORAGE_CONNECTION_STRING", "Endpoint=hunter2hunter2", "Endpoint=hunter2hunter2"),
    ],
)
def test_password_in_any_variable_is_hidden(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, secret: str
) -> None:
    monkeypatch.setenv(name, value)
    assert redact_secrets(f"refused: {secret} for bob") == f"refused: {HIDDEN} for bob"
    assert "hunter2" not in redact_secrets(f"cannot connect to {value}")


def test_texts_of_variables_that_are_no_passwords_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://bob:hunter2@database:54321/problems")
    monkeypatch.setenv("BUS", "Endpoint=sb://bus;SharedAccessKeyName=RootManageKey")
    monkeypatch.setenv("COMPASS", "north-by-northwest")
    text = (
        "bob on database:54321/problems: RootManageKey, north-by-northwest, 7 characters: hunter2"
    )
    assert redact_secrets(text) == text


LONG = "Zq7&pw\"9/L\u00e9X+t3=R <'\\r>"
"""A secret with characters that each kind of quoting changes."""


@pytest.mark.parametrize(
    "form",
    [
        html.escape(LONG),
        html.escape(html.escape(LONG)),
        LONG.replace('"', "&#34;").replace("'", "&apos;").replace("\u00e9", "&#xE9;"),
        LONG.encode().hex(),
        LONG.encode().hex().upper(),
        b32encode(LONG.encode()).decode(),
        b32encode(b"me:" + LONG.encode()).decode(),
        json.dumps(json.dumps(LONG)),
        json.dumps(LONG, ensure_ascii=False),
        ascii(repr(LONG)),
        re.sub("%..", lambda match: match[0].lower(), quote(LONG)),
        quote(quote(LONG)),
        quote(LONG, safe="/+="),
        quote_plus(LONG),
        "".join(f"%{byte:02X}" for byte in LONG.encode()),
        html.escape(quote(LONG, safe="&'")),
        f"{LONG[:5]}\x1b[1;31m{LONG[5:]}",
        f"{quote(LONG)[:9]}\n{quote(LONG)[9:]}",
        b64encode(LONG.encode()).decode()[:12] + "\x1b[0m" + b64encode(LONG.encode()).decode()[12:],
    ],
)
def test_other_encodings_of_a_secret_are_hidden(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setenv("JUDGE_TOKEN2", LONG)
    redacted = redact_secrets(f"401 for {form} at 10:00")
    before, after = redacted.split(HIDDEN)
    assert before.startswith("401 for ")
    assert after.endswith(" at 10:00")
    # Quotes around the form, or parts of characters that the secret shares with its neighbors.
    assert len(before + after) <= len("401 for  at 10:00") + 13


def test_long_text_of_backslashes_and_ampersands_is_searched_quickly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN2", LONG)
    text = "\\" * 20_000 + "&amp;" * 5_000 + "%25" * 5_000 + html.escape(LONG)
    begin = time.perf_counter()
    assert redact_secrets(text).endswith(HIDDEN)
    assert time.perf_counter() - begin < 10.0


def test_stream_hides_secrets_and_is_otherwise_the_original(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with open(os.dup(2), "w", encoding="ascii") as original:
        stream = RedactingStream(original)
        assert (stream.encoding, stream.isatty(), stream.fileno()) == (
            "ascii",
            False,
            original.fileno(),
        )
        print("key", SECRET, file=stream)
        stream.writelines(["a\n", f"{SECRET}\n"])
        stream.flush()
    assert capfd.readouterr().err == "key <hidden>\na\n<hidden>\n"


@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
@pytest.mark.parametrize("user", ["", "u:", "me:", "bob:", "user:"])
@pytest.mark.parametrize("rest", ["", "\n", "&x", ":12"])
@pytest.mark.parametrize("value", ["hf_4tokenOfTheHub", "pass\xff\xfe??>>~~word", "eight888"])
def test_secret_within_base64_is_hidden_at_each_alignment(
    monkeypatch: pytest.MonkeyPatch,
    encode: Callable[[bytes], bytes],
    user: str,
    rest: str,
    value: str,
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN2", value)
    text = encode(f"{user}{value}{rest}".encode()).decode()
    redacted = redact_secrets(f"401 for Authorization: Basic {text} at 10:00")
    before, after = redacted.split(HIDDEN)
    assert before.startswith("401 for Authorization: Basic ")
    assert after.endswith(" at 10:00")
    # At each end, at most the character that the secret shares with its neighbor is left.
    kept = before.removeprefix("401 for Authorization: Basic ")
    assert len(kept) <= math.ceil(len(user) * 8 / 6)
    left = after.removesuffix(" at 10:00").rstrip("=")
    assert len(left) <= math.ceil(len(rest) * 8 / 6) + bool(rest)


def test_base64_in_a_url_and_of_a_setting_is_hidden() -> None:
    value = "??>>of a setting"
    register_secrets([value])
    text = quote(b64encode(value.encode()), safe="")
    assert redact_secrets(f"https://judge?auth={text}").startswith(f"https://judge?auth={HIDDEN}")


@pytest.mark.parametrize("line_break", ["\n", "\r\n", r"\n"])
@pytest.mark.parametrize("num_before", [42, 44, 50, 56])
def test_base64_that_is_wrapped_over_lines_is_hidden(
    monkeypatch: pytest.MonkeyPatch, line_break: str, num_before: int
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN2", "hf_4tokenOfTheHub")
    # MIME breaks the line after 76 characters, which is 57 bytes: within the secret.
    data = encodebytes(b"u" * num_before + b"hf_4tokenOfTheHub" + b"v" * 40)
    first, second = data.decode().split()
    redacted = redact_secrets(f"mail: {first}{line_break}{second} ends")
    assert HIDDEN in redacted
    assert redacted.startswith("mail: dXV1")
    assert redacted.endswith(" ends")
    assert len(redacted.replace(HIDDEN, "")) <= len("mail:  ends") + 4 * (num_before + 42) / 3 + 4


def test_base64_of_something_else_is_shown() -> None:
    text = b64encode(b"user:no secret of this process").decode()
    assert redact_secrets(text) == text


def test_short_values_and_other_variables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("JUDGE_URL", "https://judge")
    assert redact_secrets("a token for https://judge") == "a token for https://judge"


def test_traceback_of_a_log_record_and_of_an_uncaught_exception_are_redacted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        caught = error
    information = (ValueError, caught, caught.__traceback__)
    record = logging.LogRecord("name", logging.ERROR, __file__, 1, "failed", (), information)
    formatted = RedactingFormatter().format(record)
    print_redacted_traceback(*information)
    for text in (formatted, capsys.readouterr().err):
        assert "ValueError: <hidden>" in text
        assert "sentinel" not in text
