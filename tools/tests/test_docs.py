"""Test that blocks run, broken links are found, and other blocks are not run."""

from pathlib import Path

import pytest

from tools.docs import find_broken_links, find_broken_tables, find_placeholders, main, run_blocks
from tools.inline_settings import find_unknown_settings
from tools.pages import join_blocks, split_page

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
    return join_blocks(split_page(page)[0], "python")


def test_only_python_blocks_are_joined_and_keep_their_line_numbers() -> None:
    code = _python(PAGE)
    lines = dict(enumerate(code.splitlines(), start=1))
    assert {number: line for number, line in lines.items() if line} == {
        4: "x = 1",
        18: "assert x == 1",
    }


def test_longer_fence_may_contain_a_shorter_one() -> None:
    code = _python("````text\n```python\nfail\n```\n````\n\n```python\nok = 1\n```")
    assert code.split() == ["ok", "=", "1"]


def test_later_block_sees_names_of_earlier_blocks(tmp_path: Path) -> None:
    assert run_blocks(tmp_path / "page.md", _python(PAGE)) == []


def test_failing_block_is_reported_with_its_line_in_the_page(tmp_path: Path) -> None:
    (error,) = run_blocks(tmp_path / "page.md", _python("text\n\n```python\n1 / 0\n```"))
    assert "ZeroDivisionError" in error
    assert f'File "{tmp_path}/page.md", line 4' in error


def test_links_are_relative_to_their_page(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "there.md").write_text("# There\n\n## A `part` of it\n")
    page = tmp_path / "docs" / "page.md"
    prose = (
        "## Here\n[a](there.md#a-part-of-it) [b](../docs/there.md) [c](https://example.org/x#y) "
        "[d](#here) `[e](code.md)`"
    )
    assert find_broken_links(page, prose) == []
    assert find_broken_links(page, "\n[f](missing.md)") == [
        f"{page}:2: the target of the link missing.md does not exist"
    ]


def test_rows_without_the_header_of_a_table_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    table = "| a | b |\n|---|:-:|\n| 1 | 2 |\n"
    assert find_broken_tables(page, f"text\n\n{table}\ntext\n") == []
    (fault,) = find_broken_tables(page, f"{table}\n| 3 | 4 |\n| 5 | 6 |\n")
    assert fault.startswith(f"{page}:5: these rows of a table have no header: ")


def test_link_to_a_missing_heading_is_broken(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# There\n\n```sh\n# a comment\n```\n")
    page = tmp_path / "page.md"
    assert find_broken_links(page, "[a](there.md#a-comment) [b](#gone)\n# Here") == [
        f"{page}:1: no heading matches the link there.md#a-comment",
        f"{page}:1: no heading matches the link #gone",
    ]


def test_command_fails_if_a_page_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("```python\nprint('fine')\n```\n")
    assert main([str(tmp_path)]) == 0
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "deep.md").write_text("[x](gone.md)")
    assert main([str(tmp_path)]) == 1
    assert "gone.md" in capsys.readouterr().out


def test_folder_without_pages_fails(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1


def test_placeholder_is_reported() -> None:
    page = Path("page.md")
    assert find_placeholders(page, "took 5 s\n| run | @@CLOCK |\n") == [
        f"{page}:2: the placeholder @@CLOCK was not filled in"
    ]
    assert find_placeholders(page, "mail@example.org, step@2, a todo list") == []


def test_only_named_pages_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "good.md").write_text("text\n")
    (tmp_path / "docs" / "bad.md").write_text("[a link](nowhere.md)\n")
    assert main([str(tmp_path), "docs/good.md"]) == 0
    assert main([str(tmp_path)]) == 1
    capsys.readouterr()
    assert main([str(tmp_path), "docs/absent.md"]) == 1
    assert "docs/absent.md: no such page" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "`run.save_model=false` and `~run.resume`",
        "`actor.engine.fsdp_size=4`",  # only with the FSDP engine
        "`model_engine=megatron actor.engine.tensor_parallel=4`",
        "`rollout.vllm.sleep_level=2`",  # of one variant
        "`teachers.math.engine.model.path=DIR`",  # a name that the reader chooses
        "`run.lock` and `np.random.seed=1`",
    ],
)
def test_settings_in_prose_that_exist(text: str) -> None:
    assert find_unknown_settings(Path("page.md"), text, name="docs/page.md") == []


def test_setting_in_prose_without_a_key_is_found() -> None:
    prose = "Set `run.seed=1`,\nor `run.seed=1 actor.engine.optimizer_on_cpu=true`"
    (error,) = find_unknown_settings(Path("page.md"), prose, name="docs/page.md")
    assert error.startswith(
        "page.md:2: `actor.engine.optimizer_on_cpu=true`: there is no key actor"
    )
    assert find_unknown_settings(Path("page.md"), prose, name="docs/migration/page.md") == []
