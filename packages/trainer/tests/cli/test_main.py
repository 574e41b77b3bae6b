"""The command as a person runs it: arguments in, text and an exit code out."""

import itertools
from pathlib import Path

import pytest
import yaml

from temper_trainer.__main__ import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_check_prints_ok_and_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "experiment=quickstart", "--check")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "OK"
    assert "  a step: 32 prompts x 8 = 256 completions, 1 update" in out.splitlines()
    placement = out.splitlines().index("  placement:")
    assert out.splitlines()[placement + 1] == "    this process: actor, rollout"


def test_check_does_not_create_the_run_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(capsys, "experiment=quickstart", f"run.dir={tmp_path}/run", "--check")
    assert list(tmp_path.iterdir()) == []


def test_options_can_be_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--check", "experiment=quickstart", "--config-name", "temper", "run.total_steps=3"
    )
    assert code == 0
    assert "  a run: 3 steps = 768 completions, 3 updates" in out.splitlines()  # 3 * 32 * 8


def test_print_shows_the_configuration_with_origins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "experiment=quickstart", "run.seed=4", "--print")
    assert code == 0
    assert "  seed: 4  # command line\n" in out
    assert yaml.safe_load(out)["actor"]["engine"]["optimizer"]["betas"] == [0.9, 0.99]


def test_wrong_configuration_prints_one_message_and_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "experiment=quickstart", "run.sed=1", "--check")
    assert (code, out) == (2, "")
    assert (
        err
        == "configuration error:\nthere is no key run.sed: did you mean run.seed? (set by: command line)\n"
    )


def test_missing_file_is_found_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "data.train.paths=[gone.jsonl]", "experiment=gsm8k_sft")
    assert code == 2
    assert "data.train.paths names gone.jsonl, which is not a file" in err


def test_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--multirun"])
    assert caught.value.code == 2
    assert "usage: temper-train [OVERRIDE ...]" in capsys.readouterr().err


def test_help_explains_groups_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "      quickstart: GRPO on generated arithmetic word problems" in out
    meaning = "Number of RL steps, or of updates in tasks sft, dpo and rm."
    assert f"  run.total_steps=100   [whole number]\n      {meaning}\n" in out
    assert "  actor.engine.activation_checkpointing=false   [true or false]" in out
    assert "  critic.*   [off until set]" in out


def test_help_of_every_field_has_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    lines = out[out.index("keys (key=default):") :].splitlines()[2:]
    for line, below in itertools.pairwise(lines):
        if line.startswith("  ") and not line.startswith("   "):
            assert below.startswith("      "), line


def test_help_lists_the_users_own_choices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("run: {seed: 1}\n")
    assert (
        "      mine: (in your --config-dir)"
        in run(capsys, "--help", "--config-dir", str(tmp_path))[1]
    )


def test_help_shows_the_keys_of_the_chosen_engine(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help", "model_engine=megatron")
    assert "actor.engine.device=auto" in out
    assert "activation_checkpointing" not in out


def test_run_folder_with_a_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    code, _, err = run(capsys, "experiment=quickstart", f"run.dir={tmp_path}")
    assert code == 2
    assert (
        "already contains a run: continue it with run.resume=auto, or choose another run.dir."
        in err
    )


@pytest.mark.parametrize(
    ("num_good", "status", "sentence"),
    [
        (1, 2, "{file}:2: not a JSON object"),
        (200, 1, "DataError: {file}:201: not a JSON object"),
    ],
    ids=["found before the start", "found by the run"],
)
def test_malformed_data_is_reported_with_file_and_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    num_good: int,
    status: int,
    sentence: str,
) -> None:
    file = tmp_path / "train.jsonl"
    row = '{"question": "1+1?", "answer": "#### 2"}\n'
    file.write_text(row * num_good + '{"question": \n')
    data = f"data.train.paths=[{file}]"
    code, _, err = run(capsys, "experiment=gsm8k_sft", data, f"run.dir={tmp_path}/run")
    assert code == status
    assert sentence.format(file=file) in err


def test_interrupt_during_imports_does_not_advise_to_resume(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted_reward.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["experiment=quickstart", "reward.function=interrupted_reward:f"]
    code, _, err = run(capsys, *arguments, f"run.dir={tmp_path}/run")
    assert code == 130
    assert err.startswith("interrupted before the run was started, start again with: temper-train")
    assert "run.resume=auto" not in err


def test_full_disk_names_the_last_saved_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full_disk_reward.py").write_text(
        "import errno\n"
        "class Full:\n"
        "    def __call__(self, prompt, completion): ...\n"
        "    @property\n"
        "    def __signature__(self):\n"
        "        error = OSError(errno.ENOSPC, 'No space left')\n"
        "        error.add_note('step 3 is saved in here')\n"
        "        raise error\n"
        "f = Full()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["experiment=quickstart", "reward.function=full_disk_reward:f"]
    code, _, err = run(capsys, *arguments, f"run.dir={tmp_path}/run")
    assert code == 1
    assert err.splitlines()[-1] == "step 3 is saved in here"
