"""Test that blocks run, broken links are found, and other blocks are not run."""

from pathlib import Path

import pytest

from tools.docs import broken_links, main, placeholders, run_blocks
from tools.pages import program, split_page

PAGE = """# A page

```python
x = 1
```

Between: [a link](there.md)

```sh
raise SystemExit("never")
```

```text
[not a link](nowhere.md)
```

```python
assert x == 1
```
"""


def _python(page: str) -> str:
    return program(split_page(page)[0], "python")


def test_only_python_is_code_and_lines_stay_where_they_were() -> None:
    code = _python(PAGE)
    lines = dict(enumerate(code.splitlines(), start=1))
    assert {number: line for number, line in lines.items() if line} == {
        4: "x = 1",
        18: "assert x == 1",
    }


def test_a_longer_fence_holds_a_shorter_one() -> None:
    code = _python("````text\n```python\nfail\n```\n````\n\n```python\nok = 1\n```")
    assert code.split() == ["ok", "=", "1"]


def test_a_later_block_sees_an_earlier_ones_names(tmp_path: Path) -> None:
    assert run_blocks(tmp_path / "page.md", _python(PAGE)) == []


def test_a_failing_block_is_told_with_the_pages_own_line(tmp_path: Path) -> None:
    (found,) = run_blocks(tmp_path / "page.md", _python("text\n\n```python\n1 / 0\n```"))
    assert "ZeroDivisionError" in found
    assert f'File "{tmp_path}/page.md", line 4' in found


def test_a_link_is_followed_from_its_own_page(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "there.md").write_text("# There\n\n## A `part` of it\n")
    page = tmp_path / "docs" / "page.md"
    prose = "## Here\n[a](there.md#a-part-of-it) [b](../docs/there.md) [c](https://example.org/x#y) [d](#here) `[e](code.md)`"
    assert broken_links(page, prose) == []
    assert broken_links(page, "\n[f](missing.md)") == [
        f"{page}:2: the link missing.md leads nowhere"
    ]


def test_a_link_to_a_heading_that_is_not_there_is_broken(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# There\n\n```sh\n# a comment\n```\n")
    page = tmp_path / "page.md"
    assert broken_links(page, "[a](there.md#a-comment) [b](#gone)\n# Here") == [
        f"{page}:1: the link there.md#a-comment leads to no heading",
        f"{page}:1: the link #gone leads to no heading",
    ]


def test_the_command_fails_when_one_page_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("```python\nprint('fine')\n```\n")
    assert main([str(tmp_path)]) == 0
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "deep.md").write_text("[x](gone.md)")
    assert main([str(tmp_path)]) == 1
    assert "gone.md" in capsys.readouterr().out


def test_a_folder_without_pages_is_not_a_pass(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1


def test_a_number_that_was_never_filled_in_is_named() -> None:
    page = Path("page.md")
    assert placeholders(page, "took 5 s\n| run | @@CLOCK |\n") == [
        f"{page}:2: @@CLOCK was never filled in"
    ]
    assert placeholders(page, "mail@example.org, step@2, a todo list") == []
