"""Test that the environment is created once, updated when needed, and refused with a message."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import environment
from tools.environment import (
    EnvironmentSetupError,
    check_disk,
    ensure_environment,
    env_python,
    fingerprints,
    outdated,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the environment's inputs, which tests can change."""
    for path in [
        Path("constraints/cpu.txt"),
        *(p.relative_to(ROOT) for p in ROOT.glob("packages/*/pyproject.toml")),
    ]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that ran, in order; none of them installs anything."""
    ran: list[str] = []

    def stage(name: str) -> Callable[[Path], None]:
        def run(root: Path) -> None:
            ran.append(name)
            env_python(root).parent.mkdir(parents=True, exist_ok=True)
            env_python(root).touch()

        return run

    monkeypatch.setattr(environment, "_STAGES", {name: stage(name) for name in environment._STAGES})
    return ran


def test_a_second_call_installs_nothing(checkout: Path, stages: list[str]) -> None:
    assert ensure_environment(checkout) == checkout / ".temper" / "env" / "bin" / "python"
    assert stages == ["python", "torch", "packages"]
    ensure_environment(checkout)
    assert stages == ["python", "torch", "packages"]


@pytest.mark.parametrize("file", ["packages/trainer/pyproject.toml", "constraints/cpu.txt"])
def test_a_changed_declaration_installs_the_packages_alone(
    checkout: Path, stages: list[str], file: str
) -> None:
    ensure_environment(checkout)
    stages.clear()
    with (checkout / file).open("a") as changed:
        changed.write("# one more line\n")
    ensure_environment(checkout)
    assert stages == ["packages"]


def test_another_python_begins_afresh() -> None:
    wanted = fingerprints(ROOT)
    assert outdated(wanted | {"python": "3.9 at elsewhere"}, wanted) == [
        "python",
        "torch",
        "packages",
    ]
    assert outdated(wanted | {"torch": "torch==1.0"}, wanted) == ["torch", "packages"]
    assert outdated(wanted, wanted) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"python": 3}'])
def test_a_damaged_stamp_begins_afresh(checkout: Path, stages: list[str], damage: str) -> None:
    ensure_environment(checkout)
    stages.clear()
    (checkout / ".temper" / "stamp.json").write_text(damage)
    ensure_environment(checkout)
    assert stages == ["python", "torch", "packages"]


def test_a_stage_that_fails_is_run_again_and_no_earlier_one(
    checkout: Path, stages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    working = environment._STAGES["packages"]

    def fail(root: Path) -> None:
        raise EnvironmentSetupError("no network")

    monkeypatch.setitem(environment._STAGES, "packages", fail)
    with pytest.raises(EnvironmentSetupError, match="no network"):
        ensure_environment(checkout)
    assert sorted(json.loads((checkout / ".temper" / "stamp.json").read_text())) == [
        "python",
        "torch",
    ]
    monkeypatch.setitem(environment._STAGES, "packages", working)
    stages.clear()
    ensure_environment(checkout)
    assert stages == ["packages"]


def test_a_full_disk_is_told_before_the_install(tmp_path: Path) -> None:
    check_disk(tmp_path, needed_bytes=1)
    with pytest.raises(EnvironmentSetupError, match="make room"):
        check_disk(tmp_path, needed_bytes=1 << 60)


def test_a_failed_install_shows_its_end_and_the_log(tmp_path: Path) -> None:
    (tmp_path / ".temper").mkdir()
    command = [sys.executable, "-c", "print('no such wheel'); raise SystemExit(2)"]
    with pytest.raises(
        EnvironmentSetupError,
        match=r"(?s)installing it failed with exit status 2.*no such wheel.*install\.log",
    ):
        environment._run(tmp_path, command, doing="installing it")


@pytest.mark.slow
def test_a_python_without_venv_makes_its_environment_with_pip_alone(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # makes find_spec return None, as on Debian without python3-venv
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    (checkout / ".temper").mkdir()
    environment._create(checkout)
    assert "virtualenv = " in (checkout / ".temper" / "env" / "pyvenv.cfg").read_text()
    asked = subprocess.run(
        [env_python(checkout), "-m", "pip", "--version"], capture_output=True, text=True, check=True
    )
    assert str(checkout / ".temper" / "env") in asked.stdout


def test_a_python_with_neither_venv_nor_pip_is_told_what_to_install(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("ensurepip", "pip"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        EnvironmentSetupError,
        match=r"has neither pip nor venv: .*python3-pip or python3-venv",
    ):
        environment._create(checkout)


def test_torch_is_pinned_in_one_voice() -> None:
    assert environment.TORCH in (ROOT / "constraints" / "cpu.txt").read_text().splitlines()


def test_an_old_python_gets_a_sentence() -> None:
    # Run the real file with a higher minimum version, as if the interpreter were too old.
    source = (
        (ROOT / "tools" / "dev.py")
        .read_text()
        .replace("OLDEST_PYTHON = (3, 11)", "OLDEST_PYTHON = (9, 0)")
    )
    done = subprocess.run(
        [sys.executable, "-c", source, "test"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Temper needs Python 9.0 or newer, and this is Python 3.")


def test_the_version_check_parses_on_old_pythons() -> None:
    source = (ROOT / "tools" / "dev.py").read_text()
    head = source[: source.index("\nimport argparse")]
    assert 'f"' not in head
    assert ":=" not in head


def test_an_unknown_step_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, str(ROOT / "tools" / "dev.py"), "test", "--only", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "engine-fsdp" in done.stderr
