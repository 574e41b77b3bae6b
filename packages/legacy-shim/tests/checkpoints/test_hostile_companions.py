"""What lies beside the weights is data: no code of a checkpoint runs, and nothing from elsewhere comes along."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from old_files import write_fsdp

from temper_legacy_shim.checkpoints.names import check_names

CODE = """
import os
open(os.environ["MARKER"], "w").close()
from transformers import PretrainedConfig
class FooConfig(PretrainedConfig):
    model_type = "foo"
"""


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """A role whose config asks for code of its own."""
    folder = tmp_path / "global_step_3/actor"
    write_fsdp(folder, {"model.w": torch.ones(6, 4)})
    (folder / "huggingface").mkdir()
    config = {"model_type": "foo", "architectures": ["FooForCausalLM"], "auto_map": {"AutoConfig": "configuration_foo.FooConfig"}}
    (folder / "huggingface/config.json").write_text(json.dumps(config))
    (folder / "huggingface/configuration_foo.py").write_text(CODE)
    return folder


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [((), 0, "--no-verify-names leaves the comparison out"), (("--no-verify-names", "--verify-logits"), 1, "--verify-logits")],
)
def test_code_of_a_checkpoint_never_runs_even_if_someone_says_yes(
    actor: Path, tmp_path: Path, options: tuple[str, ...], code: int, said: str
) -> None:
    command = [sys.executable, "-m", "temper_legacy_shim", "checkpoint", str(actor), "--out", str(tmp_path / "out"), *options]
    environment = {**os.environ, "MARKER": str(tmp_path / "ran"), "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert not (tmp_path / "ran").exists()
    words = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, words
    assert "code of its own (auto_map), which is never executed" in words
    assert said in words
    assert (tmp_path / "out").exists() == (code == 0)


def test_a_module_in_the_working_directory_never_runs(actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os\nopen(os.environ['MARKER'], 'w').close()\n")
    monkeypatch.setenv("MARKER", str(tmp_path / "ran"))
    monkeypatch.chdir(tmp_path)
    check_names(actor / "huggingface", {}, head="language_model")
    assert not (tmp_path / "ran").exists()
