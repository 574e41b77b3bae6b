"""Files next to the weights are data.

No code of a checkpoint runs, and nothing from elsewhere comes along.
"""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from forked_processes import run_program
from old_files import write_fsdp

from temper_legacy_shim.checkpoints import Options, Sources, convert, plan_jobs
from temper_legacy_shim.checkpoints.huggingface.names import NamesCheck
from temper_legacy_shim.errors import LayoutError

CODE = """
import os
open(os.environ["MARKER"], "w").close()
from transformers import PretrainedConfig
class FooConfig(PretrainedConfig):
    model_type = "foo"
"""


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """Return a role whose config asks for code of its own."""
    folder = tmp_path / "global_step_3/actor"
    write_fsdp(folder, {"model.w": torch.ones(6, 4)})
    (folder / "huggingface").mkdir()
    config = {
        "model_type": "foo",
        "architectures": ["FooForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_foo.FooConfig"},
    }
    (folder / "huggingface/config.json").write_text(json.dumps(config))
    (folder / "huggingface/configuration_foo.py").write_text(CODE)
    return folder


@pytest.mark.parametrize(
    ("options", "code", "given"),
    [
        ((), 0, "--no-verify-names leaves the comparison out"),
        (("--no-verify-names", "--verify-logits"), 1, "--verify-logits"),
    ],
)
def test_code_of_a_checkpoint_never_runs_even_if_someone_says_yes(
    actor: Path, tmp_path: Path, options: tuple[str, ...], code: int, given: str
) -> None:
    done = run_program(
        "from temper_legacy_shim.cli import main; main()",
        *("checkpoint", str(actor), "--out", str(tmp_path / "out"), *options),
        entered="y\n" * 9,
        variables={"MARKER": str(tmp_path / "ran"), "HF_HOME": str(tmp_path / "cache")},
    )
    assert not (tmp_path / "ran").exists()
    words = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, words
    assert "code of its own (auto_map), which is never executed" in words
    assert given in words
    assert (tmp_path / "out").exists() == (code == 0)


def test_a_module_in_the_working_directory_never_runs(
    actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import os\nopen(os.environ['MARKER'], 'w').close()\n")
    monkeypatch.setenv("MARKER", str(tmp_path / "ran"))
    monkeypatch.chdir(tmp_path)
    with NamesCheck('{"model_type": "foo"}', {}, head="language_model") as names:
        names.outcome()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("target", ["hf", "temper"])
def test_a_small_file_that_leads_elsewhere_is_refused(
    actor: Path, tmp_path: Path, name: str, target: Literal["hf", "temper"]
) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"model_type": "llama", "key": "secret"}))
    link = actor / "huggingface" / name
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    (job,) = plan_jobs(actor, tmp_path / "out")
    with pytest.raises(
        LayoutError, match=rf"{name} leads to .*secret\.json, outside the checkpoint"
    ):
        convert(job, Options(target=target, checks_names=False), Sources())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "secret.json"]


def test_links_within_a_checkpoint_and_into_its_hubs_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    folder = cache / "snapshots/abc/global_step_3/actor"
    write_fsdp(folder, {"model.w": torch.ones(6, 4)})
    (folder / "huggingface").mkdir()
    (cache / "blobs").mkdir()
    (cache / "blobs/123").write_text(json.dumps({"model_type": "llama"}))
    (folder / "huggingface/config.json").symlink_to("../../../../../blobs/123")
    (folder.parent / "tokenizer.json").write_text("{}")
    (folder / "huggingface/tokenizer.json").symlink_to("../../tokenizer.json")
    (job,) = plan_jobs(folder, tmp_path / "out")
    convert(job, Options(checks_names=False), Sources())
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


def test_a_folder_that_the_user_names_may_hold_links(actor: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (tmp_path / "elsewhere.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("config.json", "tokenizer.json"):
        (given / name).symlink_to(tmp_path / "elsewhere.json")
    (job,) = plan_jobs(actor, tmp_path / "out")
    convert(job, Options(checks_names=False), Sources(hf_config=given))
    assert (tmp_path / "out/tokenizer.json").is_file()
