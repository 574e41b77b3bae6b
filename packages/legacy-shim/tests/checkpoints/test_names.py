"""Compare names and shapes during a conversion; a config of another model ends it."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Literal

import pytest
from old_files import write_fsdp
from transformers import Qwen2Config, Qwen2ForCausalLM

from temper_legacy_shim.checkpoints import Job, Options, Sources, convert, plan_jobs
from temper_legacy_shim.checkpoints.huggingface.names import NamesCheck
from temper_legacy_shim.errors import VerificationError

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def fork_comparing_processes() -> None:
    """Start real processes in this file."""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a model of two layers, whose config says three."""
    config = Qwen2Config(
        **SIZES, num_hidden_layers=2, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]
    )
    write_fsdp(tmp_path / "actor", Qwen2ForCausalLM(config).state_dict())
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    config.save_pretrained(tmp_path / "actor/huggingface")
    (result,) = plan_jobs(tmp_path / "actor", tmp_path / "out")
    return result


# Nightly: both targets compare names in the same function.
@pytest.mark.parametrize("target", ["hf", pytest.param("temper", marks=pytest.mark.nightly)])
def test_a_config_of_another_model_ends_the_conversion_while_it_writes(
    job: Job, target: Literal["hf", "temper"]
) -> None:
    reported: list[int] = []

    def slow(what: str, done: int, total: int) -> None:
        """Delay the first block as long as the process that builds the model."""
        if not reported:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        reported.append(done)

    with pytest.raises(
        VerificationError,
        match=(
            r"missing model\.layers\.2\..*Is --hf-config the config of the model that was "
            r"trained\?"
        ),
    ):
        convert(job, Options(target=target), Sources(), progress=slow)
    assert len(reported) == 1
    assert sorted(path.name for path in job.out.parent.iterdir()) == ["actor"]


def test_the_process_that_compares_ends_with_a_conversion_that_fails(job: Job) -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text().split()
    during = []

    def fail(what: str, done: int, total: int) -> None:
        during.extend(children.read_text().split())
        raise OSError(errno.EIO, "the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        convert(job, Options(target="hf"), Sources(), progress=fail)
    assert len(during) == len(before) + 1
    assert children.read_text().split() == before


def test_folder_of_a_killed_comparison_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed = (
        "import os, signal\n"
        "from temper_legacy_shim.checkpoints.huggingface.names import NamesCheck\n"
        "check = NamesCheck('{\"model_type\": \"foo\"}', {}, head='language_model')\n"
        "check.__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", killed])
    assert process.wait() == -signal.SIGKILL
    (left,) = tmp_path.glob("temper-migrate-*")
    assert f"-{process.pid}-" in left.name
    with NamesCheck('{"model_type": "foo"}', {}, head="language_model"):
        (own,) = tmp_path.glob("temper-migrate-*")
        assert f"-{os.getpid()}-" in own.name
    assert list(tmp_path.iterdir()) == []
