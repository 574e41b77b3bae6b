"""The command: what it starts with, says and leaves."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from temper_legacy_shim.checkpoints import layouts
from temper_legacy_shim.cli import app, main
from temper_legacy_shim.errors import LayoutError, OutputError, UsageError


def test_the_command_starts_without_anything_heavy() -> None:
    heavy = ("torch", "numpy", "transformers", "hydra", "omegaconf", "yaml", "temper_trainer")
    program = (
        f"import sys; import temper_legacy_shim.cli; print([name for name in {heavy} if name in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_run_is_converted_checked_and_verified(samples: Path, tmp_path: Path) -> None:
    source, out = samples / "v0.7.1_fsdp2-actor-untied_ws2/checkpoints", tmp_path / "out"
    runner = CliRunner()
    checked = runner.invoke(
        app, ["checkpoint", str(source), "--check", "--json"], catch_exceptions=False
    )
    assert checked.exit_code == 0
    assert json.loads(checked.stdout)[0]["ok"]
    assert not out.exists()
    done = runner.invoke(
        app, ["checkpoint", str(source), "--out", str(out), "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0
    (receipt,) = json.loads(done.stdout)
    assert receipt["source"]["layout"] == "fsdp"
    assert any("names and shapes equal" in sentence for sentence in receipt["verified"])
    verified = runner.invoke(app, ["verify", str(out), "--json"], catch_exceptions=False)
    assert json.loads(verified.stdout)[0]["ok"]


def test_a_check_that_needs_a_person_exits_with_1(samples: Path) -> None:
    source = samples / "v0.3.0.post1_fsdp1-actor-untied_ws2/checkpoints"
    done = CliRunner().invoke(app, ["checkpoint", str(source), "--check"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "--hf-config" in done.stdout


def test_an_output_that_exists_is_not_touched(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    source = samples / "v0.7.1_fsdp2-actor-untied_ws2/checkpoints"
    with pytest.raises(OutputError, match="never overwritten"):
        CliRunner().invoke(
            app, ["checkpoint", str(source), "--out", str(tmp_path)], catch_exceptions=False
        )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_directory_without_a_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(LayoutError, match=r"notes\.txt"):
        CliRunner().invoke(
            app,
            ["checkpoint", str(tmp_path), "--out", str(tmp_path / "out")],
            catch_exceptions=False,
        )


def test_ctrl_c_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def stopped(*_: object, **__: object) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(layouts, "find_roles", stopped)
    monkeypatch.setattr(sys, "argv", ["temper-migrate", "checkpoint", str(tmp_path), "--check"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert "interrupted; run the same command again to go on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["hdfs://host/run", "--check"], ["{folder}", "--out", "s3://bucket/out"]]
)
def test_a_url_is_no_folder(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"(hdfs|s3):/.* is a URL, but "):
        CliRunner().invoke(
            app,
            ["checkpoint", *(word.format(folder=tmp_path) for word in arguments)],
            catch_exceptions=False,
        )
    assert list(tmp_path.iterdir()) == []


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "from temper_legacy_shim.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )


def test_version_is_printed() -> None:
    done = run_process("--version")
    assert (done.returncode, done.stdout) == (
        0,
        f"temper-migrate {version('temper-legacy-shim')}\n",
    )


def test_help_of_a_command_is_the_commands_own() -> None:
    done = run_process("--help", "checkpoint")
    assert done.returncode == 0
    assert "--to" in done.stdout
    assert done.stdout == run_process("checkpoint", "--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["script", "missing.sh"],
        ["config", "missing.yaml"],
        ["imports", "missing"],
        ["doctor", "missing"],
        ["checkpoint", "missing", "--check"],
        ["verify", "missing"],
    ],
)
def test_a_missing_input_is_a_wrong_argument_with_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["temper-migrate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "UsageError: missing" in capsys.readouterr().err
