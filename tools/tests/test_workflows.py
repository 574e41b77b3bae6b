"""Test that workflows and containers call what exists here; `nox -s workflows` lints them."""

import re
from pathlib import Path
from typing import Any

import yaml

from tools.command_rules import check_pip, list_sessions
from tools.environment import PACKAGES, TORCH

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def read_jobs(name: str) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load((WORKFLOWS / name).read_text())["jobs"]
    return jobs


def test_nightly_workflow_runs_every_package_on_every_python() -> None:
    matrix = read_jobs("nox.yml")["pythons"]["strategy"]["matrix"]
    assert matrix["package"] == list(PACKAGES)
    assert (
        f"PYTHONS = {tuple(matrix['python'])!r}".replace("'", '"')
        in (ROOT / "noxfile.py").read_text()
    )


def list_called_sessions() -> set[str]:
    """Return the sessions that the workflows call, also through a matrix."""
    text = "".join((WORKFLOWS / name).read_text() for name in ("test.yml", "nox.yml"))
    matrix: list[str] = read_jobs("nox.yml")["sessions"]["strategy"]["matrix"]["session"]
    return {*matrix, *re.findall(r"nox -s \"?([\w.-]+?)-?(?:\$|[\"\s]|\Z)", text)}


def list_excluded_sessions() -> set[str]:
    """Return the sessions that the head of nox.yml leaves out with a reason."""
    lines = re.findall(r"^#   ([\w, -]+): .+", (WORKFLOWS / "nox.yml").read_text(), re.MULTILINE)
    return {name for names in lines for name in names.split(", ")}


def test_workflows_call_every_session_or_give_a_reason() -> None:
    called, excluded = list_called_sessions(), list_excluded_sessions()
    assert called & excluded == set()
    assert called | excluded == list_sessions()


def test_test_workflow_runs_the_command_of_pull_requests() -> None:
    commands = [step.get("run") for step in read_jobs("test.yml")["test"]["steps"]]
    assert ".ci/run" in commands
    assert (ROOT / ".ci" / "run").is_file()


def test_containers_install_packages_with_existing_extras(tmp_path: Path) -> None:
    for file in sorted((ROOT / "containers").glob("*.Dockerfile")):
        text = file.read_text().replace("\\\n", " ")
        installed = re.findall(r"\"?(\./packages/[\w\[\],-]+)\"?", text)
        assert len(installed) >= 3
        assert check_pip(("pip", "install", *installed), tmp_path) == ""


def test_cpu_container_has_the_tested_torch() -> None:
    assert TORCH in (ROOT / "containers" / "cpu.Dockerfile").read_text()
