"""Test the engine template: copied under a new name, and run with the kit in a new environment."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from temper_engine_api.errors import CheckpointError
from temper_engine_api.specs import ModelSpec
from tools.environment import TORCH
from tools.new_engine import TEMPLATE, main, new_engine

ROOT = Path(__file__).resolve().parents[2]


def test_all_files_use_the_new_name(tmp_path: Path) -> None:
    files = new_engine(tmp_path / "acme", "acme_fast_engine")
    assert {path.relative_to(tmp_path / "acme").as_posix() for path in files} == {
        "README.md",
        "pyproject.toml",
        "src/acme_fast_engine/__init__.py",
        "src/acme_fast_engine/config.py",
        "src/acme_fast_engine/engine.py",
        "src/acme_fast_engine/head_outputs.py",
        "src/acme_fast_engine/py.typed",
    }
    text = "".join(path.read_text() for path in files)
    assert 'acme_fast_engine = "acme_fast_engine.engine:AcmeFastEngine"' in text
    assert "class AcmeFastConfig(EngineConfig)" in text
    for trace in ("my_engine", "my-engine", "MyEngine", "MyConfig"):
        assert trace not in text


@pytest.mark.parametrize("name", ["Acme", "acme-engine", "class", "3d", ""])
def test_invalid_package_name_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "acme"), name]) == 1
    assert "such as acme_engine" in capsys.readouterr().err
    assert not (tmp_path / "acme").exists()


@pytest.mark.parametrize("name", ["fsdp", "megatron", "torch", "types", "temper_engine_api"])
def test_name_of_an_existing_module_or_engine_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "acme"), name]) == 1
    assert f"{name!r} is the name of an existing engine or library" in capsys.readouterr().err
    assert not (tmp_path / "acme").exists()


def test_file_instead_of_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "acme").touch()
    assert main([str(tmp_path / "acme"), "acme_engine"]) == 1
    assert "acme is a file: name a new folder" in capsys.readouterr().err


def test_non_empty_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    with pytest.raises(ValueError, match="is not empty"):
        new_engine(tmp_path, "acme_engine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_template_requires_the_contract_of_this_checkout() -> None:
    assert (TEMPLATE / "pyproject.toml").read_text().count(
        "temper-engine-api>=0.2.0.dev0,<0.3"
    ) == 1
    assert 'version = "0.2.' in (ROOT / "packages/engine-api/pyproject.toml").read_text()


# Nightly: the kit's own tests start its command every day.
@pytest.mark.nightly
def test_kit_starts_here_with_only_the_plugins_of_its_extra() -> None:
    oracle = "temper_engine_api.conformance.oracle:OracleEngine"
    kit = [
        "-m",
        "pytest",
        "-p",
        "no:timeout",
        "-p",
        "no:cacheprovider",
        "--pyargs",
        "temper_engine_api.conformance",
        "--engine",
        oracle,
    ]
    done = subprocess.run(
        [sys.executable, *kit, "--collect-only", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:]


def test_new_engine_passes_the_tests_of_call_orders_and_failures(tmp_path: Path) -> None:
    # The other groups are nightly, below; these are the ones that get new rules most often.
    new_engine(tmp_path / "acme", "acme_engine")
    kit = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs"]
    kit += ["temper_engine_api.conformance", "--engine", "acme_engine.engine:AcmeEngine"]
    kit += ["--world-sizes", "1", "--groups", "call_order,capability,failed_call"]
    done = subprocess.run(
        [sys.executable, *kit],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "acme" / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_new_engine_checks_saved_buffers_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, new = write_tiny_state(tmp_path, monkeypatch)
    saved = torch.load(tmp_path / engine.STATE_FILE)
    saved["buffers"]["other"] = torch.zeros(1)
    torch.save(saved, tmp_path / engine.STATE_FILE)
    with pytest.raises(CheckpointError, match="unexpected other"):
        new._read_state(str(tmp_path))


def test_new_engine_reads_a_state_that_was_saved_without_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, new = write_tiny_state(tmp_path, monkeypatch)
    saved = torch.load(tmp_path / engine.STATE_FILE)
    del saved["buffers"]
    torch.save(saved, tmp_path / engine.STATE_FILE)
    new._read_state(str(tmp_path))
    new._model.register_buffer("other", torch.zeros(1))
    with pytest.raises(CheckpointError, match="missing other"):
        new._read_state(str(tmp_path))


def write_tiny_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the template's module, and an engine that has written its state to the folder."""
    monkeypatch.syspath_prepend(TEMPLATE / "src")
    config, engine = (importlib.import_module(f"my_engine.{name}") for name in ("config", "engine"))
    tiny: dict[str, Any] = {
        "model_type": "qwen2",
        "hidden_size": 8,
        "intermediate_size": 8,
        "vocab_size": 8,
    }
    tiny |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    new = engine.MyEngine(config.MyConfig(model=ModelSpec(architecture=tiny)))
    new.init_model()
    new._write_state(str(folder))
    return engine, new


# Nightly: installs an environment, and runs more groups of the kit than the test above.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_new_engine_passes_the_mandatory_tests_in_a_clean_environment(tmp_path: Path) -> None:
    new_engine(tmp_path / "acme", "acme_engine")
    python = tmp_path / "env" / "bin" / "python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        str(ROOT / "constraints" / "cpu.txt"),
    ]
    for command in (
        [sys.executable, "-m", "venv", str(python.parents[1])],
        [*install, TORCH],
        [*install, f"{ROOT / 'packages/engine-api'}[conformance]", f"{tmp_path / 'acme'}[test]"],
    ):
        subprocess.run(command, check=True)
    kit = [
        "-m",
        "pytest",
        "-q",
        "--pyargs",
        "temper_engine_api.conformance",
        "--engine",
        "acme_engine",
        "--world-sizes",
        "1",
    ]
    done = subprocess.run(
        [str(python), *kit], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
