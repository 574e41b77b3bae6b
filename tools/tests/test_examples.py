"""Test that the examples for schedulers start commands that exist, and valid settings."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tools.page_commands import INPUTS, check_command, record_commands, write_inputs
from tools.pages import split_page

ROOT = Path(__file__).resolve().parents[2]
STARTED_BY_SCHEDULERS = ("srun", "scontrol", "ray", "sleep", "seq", "kill")


def check_script(script: str, folder: Path) -> list[str]:
    """Return the words of the script's temper-train command, which must be valid."""
    page = (ROOT / "docs/how-to/schedulers.md").read_text()
    (settings,) = (block.text for block in split_page(page)[0] if block.language == "yaml")
    write_inputs(folder, INPUTS | {"mine.yaml": settings})
    commands = [list(each.words) for each in record_commands(script, folder=folder)]
    others = [words for words in commands if words[0] not in STARTED_BY_SCHEDULERS]
    (train,) = others
    assert check_command(train, folder=folder) == ""
    return train


def test_slurm_script_is_valid(tmp_path: Path) -> None:
    script = (ROOT / "examples" / "slurm.sh").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    # Without a node list and processes, only the commands are recorded.
    script = script.replace('while kill -0 "$driver" 2>/dev/null; do', "while false; do")
    train = check_script(script, tmp_path)
    assert train[-1] == "run.resume=auto"


@pytest.mark.parametrize("index", ["0", "1"])
def test_kubernetes_pods_run_valid_commands(tmp_path: Path, index: str) -> None:
    service, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    script = f"JOB_COMPLETION_INDEX={index}\n{container['args'][0]}"
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    if index == "0":
        # bash replaces itself by the command of `exec`, which does not exist here.
        check_script(script.replace("exec ", ""), tmp_path)
        return
    (join,) = record_commands(script, folder=tmp_path)
    assert join.words[:3] == ("ray", "start", "--address=temper-0.temper:6379")


def test_kubernetes_mounts_are_declared() -> None:
    *_, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
