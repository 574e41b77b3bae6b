"""The sub-command ``script``: files, exit codes, JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from temper_legacy_shim.cli import app
from temper_legacy_shim.errors import OutputError, ScriptError, UsageError

RUN = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "data.train_files=$HOME/a.parquet \\\n"
    "    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.n=4 trainer.nnodes=1\n"
)


def _script(folder: Path, text: str = RUN) -> Path:
    path = folder / "run.sh"
    path.write_text(text)
    path.chmod(0o755)
    return path


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["script", *arguments], catch_exceptions=False)
    return done.exit_code, done.stdout


def test_a_script_is_translated_into_a_new_file_and_the_old_one_stays(tmp_path: Path) -> None:
    old, new = _script(tmp_path), tmp_path / "new.sh"
    code, shown = _run(str(old), "--out", str(new))
    assert code == 10
    assert "pinned" in shown
    assert old.read_text() == RUN
    assert "actor.engine.model.path=$MODEL" in new.read_text()
    assert new.stat().st_mode & 0o777 == 0o755


def test_report_begins_with_what_the_user_can_act_on(tmp_path: Path) -> None:
    more = RUN.replace(
        "trainer.nnodes=1", "trainer.nnodes=1 +mine.key=1 trainer.balance_batch=True"
    )
    old, new = _script(tmp_path, more), tmp_path / "new.sh"
    lines = [line.strip() for line in _run(str(old))[1].splitlines()]
    assert lines[1].startswith("translated: 7 of 9 settings; 1 has no effect here")
    assert lines[2].startswith("written out: ")
    assert lines[3].startswith("will behave differently: ")
    assert lines[4] == "unknown: 1 key that no release has (below)"
    assert lines[5] == f"next: temper-migrate script {old} --out NEW.sh"
    levels = [
        line.partition(":")[0]
        for line in lines
        if line.startswith(("hazard:", "refused:", "note:"))
    ]
    assert levels == sorted(levels, key=("hazard", "refused", "note").index)
    assert levels.count("hazard") == int(
        lines[3].removeprefix("will behave differently: ").partition(" ")[0]
    )
    assert (
        f'next: add "$@" to the end of the command in {new}, then bash {new} --check'
        in _run(str(old), "--out", str(new))[1]
    )
    old.write_text(RUN.replace("trainer.nnodes=1", 'trainer.nnodes=1 "$@"'))
    new.unlink()
    assert f"next: bash {new} --check" in _run(str(old), "--out", str(new))[1]
    old.write_text(f"#!/bin/bash\n#SBATCH --nodes=1\n{RUN}")
    new.unlink()
    assert f"then sbatch {new} --check" in _run(str(old), "--out", str(new))[1]


def test_a_forks_own_module_is_taken_for_the_releases_and_it_is_reported(tmp_path: Path) -> None:
    code, shown = _run(
        str(_script(tmp_path, RUN.replace("verl.trainer.main_ppo", "myfork.trainer.main_ppo")))
    )
    assert code == 10
    assert "myfork.trainer.main_ppo is no program of any release: it was taken for v" in shown


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    old = _script(tmp_path)
    with pytest.raises(OutputError, match="exists"):
        _run(str(old), "--out", str(old))
    assert old.read_text() == RUN


def test_check_writes_nothing_and_says_it_in_the_exit_code(tmp_path: Path) -> None:
    code, shown = _run(
        str(_script(tmp_path, "echo hello\n")), "--check", "--out", str(tmp_path / "new.sh")
    )
    assert code == 0
    assert "no old trainer" in shown
    assert not (tmp_path / "new.sh").exists()


def test_the_json_report_has_its_documented_form(tmp_path: Path) -> None:
    code, shown = _run(str(_script(tmp_path)), "--json")
    (report,) = json.loads(shown)
    assert report["schema"] == "temper-migrate/script/1"
    assert report["exit_code"] == code == 10
    assert report["launches"][0]["entry"] == "verl.trainer.main_ppo"
    assert report["unset_variables"] == ["MODEL"]
    assert report["script"].endswith('temper-train "${temper_overrides[@]}"\n')


def test_what_is_no_script_is_one_sentence_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"run\.sh: line 2: a double quote"):
        _run(str(_script(tmp_path, 'echo ok\necho "never closed\n')))
    with pytest.raises(UsageError, match="VAR=VALUE"):
        _run(str(_script(tmp_path)), "--set", "NNODES")


def test_variable_that_no_script_names_is_reported(tmp_path: Path) -> None:
    for name, expected in (("MODLE", True), ("MODEL", False)):
        arguments = ["script", str(_script(tmp_path)), "--check", "--set", f"{name}=/m"]
        done = CliRunner().invoke(app, arguments)
        assert (f"no script names {name}" in done.stderr) is expected


@pytest.mark.parametrize(("name", "command"), [("a.py", "imports"), ("a.yaml", "config")])
def test_file_of_another_kind_is_refused_with_its_command(
    tmp_path: Path, name: str, command: str
) -> None:
    (tmp_path / name).write_text("x = f(1)\n")
    with pytest.raises(UsageError, match=rf"`temper-migrate {command} .*{name}`"):
        _run(str(tmp_path / name))


def test_the_report_says_whether_the_release_was_given_or_inferred_and_from_what(
    tmp_path: Path,
) -> None:
    script = str(
        _script(
            tmp_path,
            RUN.replace(
                "trainer.nnodes=1", "actor_rollout_ref.rollout.layer_name_map.qkv_layer_name=qkv"
            ),
        )
    )
    _, inferred = _run(script)
    # The key stood in the Megatron tree alone, so every release of the other one refuses it.
    assert (
        "line 1: ppo of v0.9.1 (inferred: v0.2 to v0.9.1 take its keys; the newest counts; even "
        "v0.9.1 refuses actor_rollout" in inferred
    )
    _, given = _run(script, "--from-version", "v0.7.0")
    assert "line 1: ppo of v0.7.0 (given as v0.7.0)" in given


def test_a_table_in_a_pipe_has_every_token_full(tmp_path: Path) -> None:
    value = "/data/" + "very-long-folder-name/" * 20 + "train.parquet"
    _, shown = _run(str(_script(tmp_path, RUN.replace("$HOME/a.parquet", value))), "--table")
    assert f"data.train_files={value}" in shown
    assert f"data.train.paths=[{value}]" in shown
    assert "\u2026" not in shown  # rich's sign for what was cut


SFT = (
    "verl.trainer.fsdp_sft_trainer data.train_files=a.parquet model.partial_pretrain=b "
    "data.micro_batch_size_per_gpu=4\n"
)


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc_per_node=$nproc -m",
        "torchrun --standalone --nnodes=1 --nproc_per_node=${nproc} -m",
    ],
)
def test_the_shells_own_number_of_processes_goes_on(tmp_path: Path, launcher: str) -> None:
    new = tmp_path / "new.sh"
    _, shown = _run(str(_script(tmp_path, f"nproc=$1\n{launcher} {SFT}")), "--out", str(new))
    number = "${nproc}" if "{" in launcher else "$nproc"
    assert f'    "actor.num_workers={number}"  # torchrun' in new.read_text()
    assert "runtime.kind=ray" in new.read_text()
    assert "actor.num_workers is the same" in shown
    assert "is torchrun's to say" not in shown


@pytest.mark.parametrize(
    "launcher",
    ["torchrun --nnodes=$n --nproc_per_node=$nproc -m", "torchrun --nproc_per_node=gpu -m"],
)
def test_a_number_of_processes_that_no_variable_is_is_a_question(
    tmp_path: Path, launcher: str
) -> None:
    script = str(_script(tmp_path, f"nproc=$1\n{launcher} {SFT}"))
    code, shown = _run(script)
    assert code == 20
    assert "a number that only a run knows: translate with --nodes N --gpus-per-node M" in shown
    code, shown = _run(script, "--nodes", "2", "--gpus-per-node", "8")
    assert "a number that only a run knows" not in shown


def test_layout_of_fine_tuning_does_not_hide_the_number_of_processes(tmp_path: Path) -> None:
    launcher = "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 -m"
    text = f"{launcher} {SFT.strip()} ulysses_sequence_parallel_size=2\n"
    _, shown = _run(str(_script(tmp_path, text)))
    assert "8 processes on each of $SLURM_NNODES nodes, a number that only a run knows" in shown
