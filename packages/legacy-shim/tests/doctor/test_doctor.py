"""The plan of a project, and carrying it out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from temper_legacy_shim.cli import app
from temper_legacy_shim.doctor.examination import examine
from temper_legacy_shim.doctor.steps import Effort, Kind, carry_out
from temper_legacy_shim.errors import UsageError, format_extra_install

RUN = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "data.train_files=a.parquet \\\n"
    "    actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.n=4 trainer.nnodes=1\n"
)
CONFIG = (
    "defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}\nactor_rollout_ref: "
    "{rollout: {name: vllm, n: 4}}\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts/run.sh").write_text(RUN)
    (folder / "scripts/clean.sh").write_text("rm -rf /tmp/x\n")
    (folder / "conf.yaml").write_text(CONFIG)
    (folder / "other.yaml").write_text("name: mine\n")
    (folder / "reward.py").write_text(
        "from verl import DataProto\nfrom verl.utils.tracking import Tracking\n"
    )
    return folder


def test_everything_old_is_found_and_nothing_else(project: Path) -> None:
    steps = {str(step.path): step for step in examine(project)}
    assert list(steps) == ["conf.yaml", "scripts/run.sh", "reward.py"]
    assert [step.kind for step in steps.values()] == [Kind.CONFIG, Kind.SCRIPT, Kind.IMPORTS]
    assert steps["scripts/run.sh"].effort is Effort.REVIEW
    assert steps["reward.py"].effort is Effort.DECIDE
    assert "run.trackers" in steps["reward.py"].blockers[1]


@pytest.mark.parametrize("name", ["launch", "train.job", "train.pbs", "train.lsf", "train.zsh"])
def test_script_of_any_name_is_in_the_plan(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(f"#!/bin/bash\n{RUN}")
    assert [str(step.path) for step in examine(tmp_path)] == [name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("requirements.txt", "torch\nverl[vllm]==0.6.1  # pinned\n"),
        ("pyproject.toml", '[project]\ndependencies = ["verl == 0.6.1"]\n'),
        ("setup.py", 'install_requires=["verl @ git+https://host/verl.git@v0.6.1"]\n'),
        ("Dockerfile", "RUN pip install verl==0.6.1\n"),
    ],
)
def test_release_that_the_project_pins_is_used(project: Path, name: str, text: str) -> None:
    (project / name).write_text(text)
    steps = {str(step.path): step for step in examine(project)}
    assert steps["conf.yaml"].what == "ppo of v0.6.1"
    assert "of v0.6.1" in steps["scripts/run.sh"].what
    assert steps["scripts/run.sh"].command.endswith(" --from-version v0.6.1")


def test_pinned_release_that_is_newer_than_all_known_is_a_question(project: Path) -> None:
    (project / "requirements.txt").write_text("verl==0.99.0\n")
    first = examine(project)[0]
    assert (str(first.path), first.what) == ("requirements.txt", "verl 0.99.0")
    assert "is newer than the newest release that is known here" in first.blockers[0]


def test_the_plan_is_carried_out_into_a_new_folder_and_the_old_one_stays(
    project: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    out = tmp_path / "new"
    done = CliRunner().invoke(
        app,
        ["doctor", str(project), "--apply", str(out), "--yes", "--json"],
        catch_exceptions=False,
    )
    assert done.exit_code == 20
    steps = json.loads(done.stdout)["steps"]
    assert all(step["result"].startswith("wrote") for step in steps)
    assert "temper-train" in (out / "scripts/run.sh").read_text()
    assert (
        "+from temper_engine_api.batch import PackedBatch" in (out / "reward.py.diff").read_text()
    )
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before
    again = CliRunner().invoke(
        app,
        ["doctor", str(project), "--apply", str(out), "--yes", "--json"],
        catch_exceptions=False,
    )
    assert all("stays as it is" in step["result"] for step in json.loads(again.stdout)["steps"])


def test_a_release_that_is_given_counts_for_every_configuration_and_script(project: Path) -> None:
    reported = ["doctor", str(project), "--json", "--from-version", "v0.4.0"]
    steps = json.loads(CliRunner().invoke(app, reported, catch_exceptions=False).stdout)["steps"]
    assert "v0.4.0" in steps[0]["what"]
    assert [step["command"].endswith("--from-version v0.4.0") for step in steps] == [
        True,
        True,
        False,
    ]


def _with_checkpoint(project: Path, *marks: str) -> None:
    role = project / "checkpoints/global_step_2/actor"
    (role / "huggingface").mkdir(parents=True)
    for name in ("model_world_size_1_rank_0.pt", *marks):
        (role / name).write_text("{}")


@pytest.mark.parametrize(
    ("marks", "release", "given"),
    [
        (("config.json",), "v0.4.0", "(as its checkpoint, of 0.4.0)"),
        (("huggingface/config.json",), "v0.3.0", "(as its checkpoint, of 0.2 to 0.3.0)"),
        (
            ("fsdp_config.json",),
            "v0.9",
            "(inferred from its keys; its checkpoint is of 0.4.1 or newer)",
        ),
    ],
)
def test_script_is_read_as_of_the_release_of_the_checkpoint_next_to_it(
    project: Path, tmp_path: Path, marks: tuple[str, ...], release: str, given: str
) -> None:
    _with_checkpoint(project, *marks)
    (step,) = (each for each in examine(project) if each.kind is Kind.SCRIPT)
    assert f"of {release}" in step.what
    assert step.what.endswith(given)
    assert (step.version or "v0.9").startswith(release)
    assert step.command.endswith(f"--from-version {step.version}") is (step.version is not None)
    carry_out(step, project, tmp_path / "new")
    assert release in (tmp_path / "new/scripts/run.sh").read_text()
    (given,) = (each for each in examine(project, version="v0.7.0") if each.kind is Kind.SCRIPT)
    assert given.what.endswith("of v0.7.0")


def test_a_release_that_never_was_is_refused(project: Path) -> None:
    with pytest.raises(UsageError, match="'v7' is no version: give one such as"):
        examine(project, version="v7")


def test_a_step_may_be_left_out(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    done = CliRunner().invoke(
        app,
        ["doctor", str(project), "--apply", str(out)],
        input="y\nn\nn\n",
        catch_exceptions=False,
    )
    assert "left out" not in (out / "conf.yaml").read_text()
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == ["conf.yaml"]
    assert done.exit_code == 20


def test_a_forks_copy_of_the_old_package_is_one_step_and_its_files_are_none(project: Path) -> None:
    copy = project / "verl"
    (copy / "trainer/config").mkdir(parents=True)
    (copy / "__init__.py").write_text("")
    (copy / "trainer/main_ppo.py").write_text("from verl import DataProto\n")
    (copy / "trainer/config/ppo_trainer.yaml").write_text(CONFIG)
    steps = {str(step.path): step for step in examine(project)}
    assert list(steps) == ["conf.yaml", "scripts/run.sh", "reward.py", "verl"]
    assert steps["verl"].effort is Effort.REWRITE
    assert "has to be written again" in steps["verl"].blockers[0]
    assert steps["verl"].command == "diff -ru RELEASE/verl verl"  # not hundreds of old imports


def test_a_file_that_another_one_builds_on_is_a_part_of_it(project: Path, tmp_path: Path) -> None:
    (project / "base.yaml").write_text("actor_rollout_ref: {rollout: {n: 16}}\n")
    (project / "conf.yaml").write_text(
        CONFIG.replace("[ppo_trainer, _self_]", "[ppo_trainer, _self_, base]")
    )
    assert [str(step.path) for step in examine(project) if step.kind is Kind.CONFIG] == [
        "conf.yaml"
    ]
    CliRunner().invoke(
        app,
        ["doctor", str(project), "--apply", str(tmp_path / "new"), "--yes"],
        catch_exceptions=False,
    )
    assert "group_size: 16" in (tmp_path / "new/conf.yaml").read_text()


def test_a_script_that_writes_one_which_launches_is_a_step(project: Path) -> None:
    (project / "submit.sh").write_text(f"cat > job.sh <<'END'\n{RUN}END\nsbatch job.sh\n")
    step = next(step for step in examine(project) if str(step.path) == "submit.sh")
    assert (step.kind, step.effort) == (Kind.SCRIPT, Effort.DECIDE)
    assert "line 1: the launch is in a text that another shell runs" in step.blockers[0]


def test_a_makefile_that_launches_is_a_step_and_stays(project: Path, tmp_path: Path) -> None:
    command = RUN.replace("\\\n", " ").strip()
    (project / "Makefile").write_text(f"all: train\n\nlint:\n\truff .\ntrain:\n\t{command}\n")
    step = next(step for step in examine(project) if str(step.path) == "Makefile")
    assert (step.effort, step.command) == (Effort.REWRITE, "make -C . -n train")
    assert step.blockers[0].startswith("line 5: the rule train starts verl.trainer.main_ppo: save")
    assert "nothing was written" in carry_out(step, project, tmp_path / "new")


def test_a_folder_without_anything_old_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "nothing of an older system" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("fork_comparing_processes")
def test_a_checkpoint_is_planned_and_converted(samples: Path, tmp_path: Path) -> None:
    pytest.importorskip(
        "torch", reason="needs torch: an environment with temper-legacy-shim[checkpoint] runs this"
    )
    project, out = tmp_path / "old", tmp_path / "new"
    shutil.copytree(samples / "v0.7.1_fsdp2-actor-untied_ws2/checkpoints", project / "checkpoints")
    (step,) = examine(project)
    assert (step.kind, step.effort) == (Kind.CHECKPOINT, Effort.NONE)
    assert "actor: fsdp, 2 ranks" in step.what
    done = CliRunner().invoke(
        app, ["doctor", str(project), "--apply", str(out), "--yes"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert (out / "checkpoints/config.json").is_file()


_CONVERT_WITHOUT_BLAKE3 = """
import sys
from pathlib import Path
from temper_legacy_shim.doctor.steps import Effort, Kind, Step, carry_out
sys.modules["blake3"] = None  # as if it were not installed
step = Step(
    kind=Kind.CHECKPOINT, path=Path("old"), what="", effort=Effort.NONE, blockers=(), command=""
)
carry_out(step, Path(), Path("new"))
"""


def test_a_checkpoint_without_its_extra_is_refused_with_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT_WITHOUT_BLAKE3],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        f"needs blake3, which is not installed: run {format_extra_install('checkpoint')}."
        in done.stderr.splitlines()[-1]
    )


def test_a_plan_in_a_pipe_has_every_path_full(tmp_path: Path) -> None:
    folder = tmp_path / "-".join(["nested"] * 12) / "-".join(["deeper"] * 12)
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text(RUN)
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)], catch_exceptions=False)
    assert (
        f"script \u2502 {(folder / 'run.sh').relative_to(tmp_path)} \u2502 1 launch of "
        "verl.trainer.main_ppo of v0.9.1" in done.stdout
    )


@pytest.mark.parametrize("name", ["a.sh", "Makefile", "a.yaml"])
@pytest.mark.parametrize("is_pipe", [True, False])
def test_file_that_cannot_be_read_is_a_step(project: Path, name: str, is_pipe: bool) -> None:
    if is_pipe:
        os.mkfifo(project / name)
    else:
        (project / name).symlink_to("absent")
    (project / "a.py").symlink_to("absent")
    steps = {str(step.path): step for step in examine(project)}
    assert list(steps) == [name, "conf.yaml", "scripts/run.sh", "reward.py"]
    assert "is no file that can be read" in steps[name].blockers[0]


def test_pin_in_a_comment_is_none(project: Path) -> None:
    (project / "requirements.txt").write_text("# verl==0.1.0\nverl==0.6.1\n")
    steps = {str(step.path): step for step in examine(project)}
    assert steps["conf.yaml"].what == "ppo of v0.6.1"


@pytest.mark.parametrize("name", ["run.train", "run_v0.1"])
def test_script_with_a_shebang_and_an_odd_suffix_is_in_the_plan(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(f"#!/bin/bash\n{RUN}")
    assert [str(step.path) for step in examine(tmp_path)] == [name]


def test_makefile_of_another_name_is_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "train.mk").write_text(f"train:\n\t{RUN.splitlines()[0][:-1]}\n")
    assert [step.command for step in examine(tmp_path)] == ["make -C . -f train.mk -n train"]


def test_checkpoint_next_to_a_script_counts_before_the_pin(project: Path) -> None:
    _with_checkpoint(project, "huggingface/config.json")
    (project / "requirements.txt").write_text("verl==0.6.1\n")
    steps = {str(step.path): step for step in examine(project)}
    assert "as its checkpoint, of " in steps["scripts/run.sh"].what


@pytest.mark.parametrize("name", ["justfile", ".justfile", "Justfile", "Taskfile.yml"])
def test_file_of_another_runner_is_named_as_not_followed(tmp_path: Path, name: str) -> None:
    program = "task" if name.startswith("Task") else "just"
    (tmp_path / name).write_text(f"train:\n  {RUN.splitlines()[0]}\n")
    (step,) = examine(tmp_path)
    assert (step.effort, step.what) == (
        Effort.REWRITE,
        f"a file of {program}, whose commands are not followed",
    )
    assert step.blockers[0].startswith("line 2 starts verl.trainer.main_ppo")
    (tmp_path / name).write_text("train:\n  bash train.sh\n")
    assert [step.effort for step in examine(tmp_path)] == [Effort.REVIEW]
    (tmp_path / name).write_text("build:\n  cargo build\n")
    assert examine(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "command"),
    [("justfile", "just -f justfile --list"), ("Taskfile.yml", "task -t Taskfile.yml --list-all")],
)
def test_nothing_is_written_for_a_file_of_another_runner(
    tmp_path: Path, name: str, command: str
) -> None:
    (tmp_path / name).write_text("train:\n  bash train.sh\n")
    (step,) = examine(tmp_path)
    assert step.command == command
    assert carry_out(step, tmp_path, tmp_path / "new").startswith("its commands are not followed")
    (tmp_path / name).write_text("#" * 2_000_001)
    (step,) = examine(tmp_path)
    assert (step.what, step.command) == ("not readable", command)


def test_python_file_that_may_not_be_read_is_a_step(project: Path) -> None:
    (project / "a.py").symlink_to("/proc/self/mem")  # no process may read its first byte
    (step,) = [step for step in examine(project) if str(step.path) == "a.py"]
    assert step.blockers == (
        "line 1: the file can't be read (Input/output error): change it by hand",
    )
