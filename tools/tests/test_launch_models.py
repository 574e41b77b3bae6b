"""Test how the check of the models that launch files name reads failures and writes its page."""

import re
import sys
from pathlib import Path

import pytest

from tools import launch_models
from tools.launch_models import ENGINES, PAGE, check_model, render_page


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("pass", ""),
        (
            "sys.exit('configuration error: DIR/model\\n has no weights')",
            "DIR/model has no weights",
        ),
        ("print('log', file=sys.stderr); sys.exit('KeyError: 3')", "KeyError: 3"),
        ("sys.exit('configuration error:')", "configuration error:"),
        ("sys.exit(7)", "exit status 7"),
    ],
)
def test_command_that_fails_is_never_accepted(
    program: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; " + program.replace("DIR", str(tmp_path))
    monkeypatch.setattr(launch_models, "CHECK_COMMAND", (sys.executable, "-c", code))
    assert check_model(tmp_path, "fsdp") == expected


def test_page_is_rendered_from_its_verdicts() -> None:
    rows = [re.split(r" \| ", row.strip("| ")) for row in PAGE.read_text().splitlines()]
    verdicts = [
        (
            row[1],
            row[2],
            {
                engine: "" if cell == "accepted" else cell.replace(r"\|", "|")
                for engine, cell in zip(ENGINES, row[3:], strict=True)
            },
        )
        for row in rows
        if row[0].isdigit()
    ]
    assert len(verdicts) == launch_models.NUM_CHECKED
    assert render_page(verdicts) == PAGE.read_text()


def test_bar_in_a_message_does_not_end_its_cell() -> None:
    page = render_page([("m", "llama", {"fsdp": "a | b", "megatron": ""})])
    assert r"| 1 | m | llama | a \| b | accepted |" in page
    assert "Accepted: 0 of 1 (fsdp), 1 of 1 (megatron)." in page
