"""Test which tests `dev.py test --changed` selects, in a small repository and in this one."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.affected_tests import (
    UNKNOWN_DISTANCE,
    Selection,
    build_steps,
    describe,
    read_durations,
    read_graph,
    read_pages,
    run_affected,
    select_tests,
)
from tools.git_changes import Changes, ChangesError, find_changes
from tools.steps import STEPS

ROOT = Path(__file__).resolve().parents[2]

CORE = "packages/engine-api"
TRAINER = "packages/trainer"
FILES = {
    f"{CORE}/src/made_core/__init__.py": "",
    f"{CORE}/src/made_core/base.py": "X = 1\n",
    f"{CORE}/src/made_core/batch.py": "from made_core.base import X\n",
    f"{CORE}/tests/conftest.py": "",
    f"{CORE}/tests/test_base.py": "import made_core.base\ndef test_a(): pass\n",
    f"{CORE}/tests/test_batch.py": (
        "import pytest\nfrom made_core import batch\n"
        "def test_a(): pass\n@pytest.mark.slow\ndef test_b(): pass\n"
    ),
    f"{TRAINER}/src/made_trainer/__init__.py": "",
    f"{TRAINER}/src/made_trainer/loop.py": "import made_core.batch\n",
    f"{TRAINER}/src/made_trainer/conf/grpo.yaml": "lr: 1\n",
    f"{TRAINER}/src/made_trainer/conf/ppo.yaml": "lr: 1\n",
    f"{TRAINER}/tests/helper.py": "",
    f"{TRAINER}/tests/test_loop.py": "def test_a():\n    from made_trainer import loop\n",
    f"{TRAINER}/tests/test_conf.py": "from .helper import X\ndef test_a(): assert 'a=grpo'\n",
    f"{TRAINER}/tests/test_night.py": (
        "import pytest, made_trainer.loop\npytestmark = [pytest.mark.nightly]\ndef test_a(): pass\n"
    ),
    "tools/made_tool.py": "",
    "tools/tests/test_made_tool.py": "import tools.made_tool\ndef test_a(): pass\n",
    "docs/page.md": "[other](other.md)\n",
    "docs/other.md": "text\n",
    ".gitignore": "ignored.py\n__pycache__/\n",
}


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two packages and a tool, on the branch main."""
    root = tmp_path / "made"
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


def select(
    root: Path,
    *,
    durations: Mapping[str, Mapping[str, float]] | None = None,
    limit_s: float = 1000.0,
    base: str | None = None,
) -> Selection:
    changes = find_changes(root, base=base)
    return select_tests(
        changes,
        read_graph(root, changes),
        pages=read_pages(root),
        durations=durations or {},
        limit_s=limit_s,
    )


def list_chosen(selection: Selection) -> dict[str, int]:
    return {Path(file.path).stem: file.distance for file in selection.chosen}


def test_source_affects_direct_and_transitive_tests_of_all_packages(repository: Path) -> None:
    (repository / CORE / "src/made_core/base.py").write_text("X = 2\n")
    selection = select(repository)
    assert list_chosen(selection) == {"test_base": 1, "test_batch": 2, "test_loop": 3}
    assert selection.typed == (f"{CORE}/src",)
    assert selection.left_out_steps == ("kit-on-fsdp", "kit-on-megatron")


def test_slow_tests_run_only_in_files_that_import_the_change_directly(repository: Path) -> None:
    (repository / CORE / "src/made_core/base.py").write_text("X = 2\n")
    selection = select(repository)
    slow = f"{CORE}/tests/test_batch.py::test_b"
    assert selection.slow_tests == (slow,)
    (step,) = (step for step in build_steps(selection) if step.name == "changed-engine-api")
    assert f"--deselect={slow}" in step.commands[0]
    (repository / CORE / "src/made_core/batch.py").write_text("X = 2\n")
    assert select(repository).slow_tests == ()


def test_changed_conftest_affects_its_folder_and_a_helper_its_importers(repository: Path) -> None:
    (repository / CORE / "tests/conftest.py").write_text("X = 1\n")
    assert list_chosen(select(repository)) == {"test_base": 1, "test_batch": 1}
    git(repository, "checkout", "--quiet", ".")
    (repository / TRAINER / "tests/helper.py").write_text("X = 1\n")
    assert list_chosen(select(repository)) == {"test_conf": 1}


def test_data_affects_the_tests_that_name_it_or_else_those_of_the_package(repository: Path) -> None:
    (repository / TRAINER / "src/made_trainer/conf/grpo.yaml").write_text("lr: 2\n")
    assert list_chosen(select(repository)) == {"test_conf": 1}
    (repository / TRAINER / "src/made_trainer/conf/ppo.yaml").write_text("lr: 2\n")
    assert list_chosen(select(repository)) == {"test_conf": 1, "test_loop": UNKNOWN_DISTANCE}


def test_untracked_test_runs_and_an_ignored_file_does_not_count(repository: Path) -> None:
    (repository / TRAINER / "tests/test_new.py").write_text("def test_a(): pass\n")
    (repository / "ignored.py").write_text("")
    assert find_changes(repository).paths == (f"{TRAINER}/tests/test_new.py",)
    assert list_chosen(select(repository)) == {"test_new": 0}


def test_deleted_module_affects_the_tests_that_still_import_it(repository: Path) -> None:
    (repository / TRAINER / "src/made_trainer/loop.py").unlink()
    assert list_chosen(select(repository)) == {"test_loop": 1}


def test_deleted_module_affects_the_tests_of_modules_that_still_import_it(
    repository: Path,
) -> None:
    (repository / CORE / "src/made_core/base.py").unlink()
    assert list_chosen(select(repository)) == {"test_base": 1, "test_batch": 2, "test_loop": 3}


def test_changed_tool_affects_its_tests_and_a_page_only_its_checks(repository: Path) -> None:
    (repository / "tools/made_tool.py").write_text("X = 1\n")
    (repository / "docs/other.md").write_text("new\n")
    selection = select(repository)
    assert list_chosen(selection) == {"test_made_tool": 1}
    assert (selection.typed, selection.pages) == (("tools",), ("docs/other.md",))
    assert [step.name for step in build_steps(selection)] == [
        "lint",
        "layers",
        "types",
        "changed-tools",
        "docs",
    ]


def test_pages_that_name_a_deleted_page_are_checked(repository: Path) -> None:
    (repository / "docs/other.md").unlink()
    assert select(repository).pages == ("docs/page.md",)


def test_nearest_files_come_first_up_to_the_limit_and_the_rest_is_printed(repository: Path) -> None:
    (repository / CORE / "src/made_core/base.py").write_text("X = 2\n")
    durations = {
        f"{CORE}/tests/test_base.py": {"test_a": 3.0},
        f"{CORE}/tests/test_batch.py": {"test_a": 4.0, "test_b": 50.0},
        f"{TRAINER}/tests/test_loop.py": {"test_a": 2.0},
    }
    selection = select(repository, durations=durations, limit_s=8.0)  # 3 + 4 fit, 3 + 4 + 2 do not
    assert list_chosen(selection) == {"test_base": 1, "test_batch": 2}
    lines = describe(find_changes(repository), selection)
    assert f"changed:     {TRAINER}/tests/test_loop.py" in lines
    (command,) = (line for line in lines if "what was left out" in line)
    assert command.endswith(
        "dev.py test --only kit-on-fsdp --only kit-on-megatron --only engine-api --only trainer"
    )


def test_file_without_a_report_counts_as_the_mean_of_its_step(repository: Path) -> None:
    (repository / CORE / "src/made_core/base.py").write_text("X = 2\n")
    budgets = {step.name: step.budget_s for step in STEPS}
    expected = {Path(file.path).stem: file.expected_s for file in select(repository).chosen}
    # The repository has two test files of engine-api, and three of the trainer.
    assert expected == {
        "test_base": budgets["engine-api"] / 2,
        "test_batch": budgets["engine-api"] / 2,
        "test_loop": budgets["trainer"] / 3,
    }


def test_changed_test_file_runs_beyond_the_limit(repository: Path) -> None:
    (repository / TRAINER / "tests/test_loop.py").write_text("def test_b(): pass\n")
    assert list_chosen(select(repository, limit_s=0.0)) == {"test_loop": 0}


def test_branch_is_compared_with_the_merge_base_or_a_named_commit(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "-b", "work")
    (repository / TRAINER / "tests/test_loop.py").write_text("def test_b(): pass\n")
    git(repository, "commit", "--quiet", "-am", "second")
    git(repository, "checkout", "--quiet", "main")
    (repository / "docs/page.md").write_text("main only\n")
    git(repository, "commit", "--quiet", "-am", "third")
    git(repository, "checkout", "--quiet", "work")
    assert find_changes(repository).paths == (f"{TRAINER}/tests/test_loop.py",)
    assert find_changes(repository, base="HEAD").paths == ()
    assert "docs/page.md" in find_changes(repository, base="main").paths


def test_nothing_changed_runs_nothing(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_affected(repository) == 0
    assert "nothing differs from" in capsys.readouterr().out


def test_clear_errors_name_the_cause(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(ChangesError, match="plain is not a git checkout"):
        find_changes(tmp_path / "plain")
    with pytest.raises(ChangesError, match="there is no commit 'nowhere'"):
        find_changes(repository, base="nowhere")
    (repository / CORE / "src/made_core/base.py").write_text("def (\n")
    with pytest.raises(ChangesError, match="cannot parse"):
        select(repository)
    git(repository, "branch", "--quiet", "-m", "other")
    with pytest.raises(ChangesError, match="no merge base with main"):
        find_changes(repository)


def test_durations_are_read_from_the_reports_of_steps(tmp_path: Path) -> None:
    reports = tmp_path / ".temper" / "reports"
    reports.mkdir(parents=True)
    name = 'classname="packages.engine-api.tests.test_a'
    (reports / "engine-api-0.xml").write_text(
        f'<s><testcase {name}" name="test_x[1]" time="1.5"/><testcase {name}" name="test_x[2]" '
        f'time="2"/><testcase {name}.TestB" name="test_y" time="4"/></s>'
    )
    (reports / "trainer-0.xml").write_text("<cut off")
    path = "packages/engine-api/tests/test_a.py"
    assert read_durations(tmp_path, [path]) == {path: {"test_x": 3.5, "TestB::test_y": 4.0}}


def test_durations_of_a_step_whose_name_begins_like_another_are_counted_once(
    tmp_path: Path,
) -> None:
    reports = tmp_path / ".temper" / "reports"
    reports.mkdir(parents=True)
    name = 'classname="packages.trainer.tests.loops.test_a" name="test_x"'
    (reports / "trainer-loops-0.xml").write_text(f'<s><testcase {name} time="1.5"/></s>')
    path = "packages/trainer/tests/loops/test_a.py"
    assert read_durations(tmp_path, [path]) == {path: {"test_x": 1.5}}


def test_durations_of_a_loaded_host_are_scaled_to_the_budget_of_the_step(tmp_path: Path) -> None:
    (budget_s,) = (step.budget_s for step in STEPS if step.name == "trainer")
    reports = tmp_path / ".temper" / "reports"
    reports.mkdir(parents=True)
    (reports / "trainer-0.xml").write_text(
        '<testsuites><testsuite><testcase classname="packages.trainer.tests.test_a" name="test_x" '
        f'time="{3 * budget_s}"/><testcase classname="packages.trainer.tests.test_a" name="test_y" '
        f'time="{budget_s}"/></testsuite></testsuites>'
    )
    path = "packages/trainer/tests/test_a.py"
    # 4 budgets were measured, so every time counts a quarter.
    assert read_durations(tmp_path, [path]) == {
        path: {"test_x": 0.75 * budget_s, "test_y": 0.25 * budget_s}
    }


def test_graph_of_this_repository() -> None:
    changes = Changes(base="", present=(), deleted=())
    graph = read_graph(ROOT, changes)
    batch = graph.compute_distances(["packages/engine-api/src/temper_engine_api/batch.py"])
    assert batch["packages/engine-api/tests/test_batch.py"] == 1
    assert batch["packages/trainer/tests/loops/test_runs.py"] > 1
    dev = graph.compute_distances(["tools/dev.py"])
    assert dev["tools/tests/test_dev.py"] == 1
    assert "packages/trainer/tests/loops/test_runs.py" not in dev
    assert (
        graph.compute_distances(["packages/trainer/tests/conftest.py"])[
            "packages/trainer/tests/config/test_algorithm.py"
        ]
        == 1
    )
    assert all(tests for tests in graph.tests.values())


def test_continuous_integration_never_uses_it() -> None:
    for file in (ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").iterdir()):
        assert "--changed" not in file.read_text(), file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--changed", "--only", "lint"), "leave out --only"),
        (("--base", "HEAD"), "--base needs --changed"),
    ],
)
def test_options_that_contradict_are_refused(arguments: tuple[str, ...], message: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "dev.py"), "test", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
