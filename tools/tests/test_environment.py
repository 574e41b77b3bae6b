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
    compute_fingerprints,
    ensure_environment,
    env_python,
    find_outdated_stages,
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
def test_changed_declaration_reinstalls_only_the_packages(
    checkout: Path, stages: list[str], file: str
) -> None:
    ensure_environment(checkout)
    stages.clear()
    with (checkout / file).open("a") as changed:
        changed.write("# one more line\n")
    ensure_environment(checkout)
    assert stages == ["packages"]


def test_changed_python_reinstalls_everything() -> None:
    expected = compute_fingerprints(ROOT)
    assert find_outdated_stages(expected | {"python": "3.9 at elsewhere"}, expected) == [
        "python",
        "torch",
        "packages",
    ]
    assert find_outdated_stages(expected | {"torch": "torch==1.0"}, expected) == [
        "torch",
        "packages",
    ]
    assert find_outdated_stages(expected, expected) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"python": 3}'])
def test_damaged_stamp_reinstalls_everything(
    checkout: Path, stages: list[str], damage: str
) -> None:
    ensure_environment(checkout)
    stages.clear()
    (checkout / ".temper" / "stamp.json").write_text(damage)
    ensure_environment(checkout)
    assert stages == ["python", "torch", "packages"]


def test_failed_stage_is_repeated_without_earlier_stages(
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


def test_full_disk_is_reported_before_the_installation(tmp_path: Path) -> None:
    check_disk(tmp_path, needed_bytes=1)
    with pytest.raises(EnvironmentSetupError, match="free space"):
        check_disk(tmp_path, needed_bytes=1 << 60)


def test_failed_installation_shows_its_last_lines_and_the_log(tmp_path: Path) -> None:
    (tmp_path / ".temper").mkdir()
    command = [sys.executable, "-c", "print('no such wheel'); raise SystemExit(2)"]
    with pytest.raises(
        EnvironmentSetupError,
        match=r"(?s)installing it failed with exit status 2.*no such wheel.*install\.log",
    ):
        environment._run(tmp_path, command, action="installing it")


# Nightly: it installs virtualenv, which takes longer than the other tests of the file.
@pytest.mark.nightly
def test_python_without_venv_creates_the_environment_with_pip(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # makes find_spec return None, as on Debian without python3-venv
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    (checkout / ".temper").mkdir()
    environment._create_environment(checkout)
    assert "virtualenv = " in (checkout / ".temper" / "env" / "pyvenv.cfg").read_text()
    result = subprocess.run(
        [env_python(checkout), "-m", "pip", "--version"], capture_output=True, text=True, check=True
    )
    assert str(checkout / ".temper" / "env") in result.stdout


def test_python_without_venv_and_pip_is_refused_with_advice(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("ensurepip", "pip"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        EnvironmentSetupError,
        match=r"has neither pip nor venv: .*python3-pip or python3-venv",
    ):
        environment._create_environment(checkout)


def test_torch_version_equals_the_constraints() -> None:
    assert environment.TORCH in (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
