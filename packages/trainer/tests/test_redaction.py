"""Values of secrets in messages."""

import json
import logging
from urllib.parse import quote

import pytest

from temper_trainer.redaction import RedactingFormatter, print_redacted_traceback, redact_secrets

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
