"""Run a policy with the Python tool that looks for the trainer's secrets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from packages.trainer.tests.loops.conftest import SMALL

SENTINELS = {
    "HF_TOKEN": "sentinel-of-hugging-face",
    "WANDB_API_KEY": "sentinel-of-wandb",
    "JUDGE_KEY": "sentinel-of-a-judge",
}
PROGRAM = """
import glob, os
print(dict(os.environ))
for file in [f'/proc/{os.getppid()}/environ', *glob.glob('/proc/[0-9]*/environ')]:
    try:
        for entry in open(file, errors='replace').read().split(chr(0)):
            if 'sentinel' in entry: print(entry)
    except OSError:
        pass
"""
DRIVER = """
import sys
from pathlib import Path
from temper_trainer.config_loading import load, write_resolved
from temper_trainer.loops import train
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.runtime.runtime_factory import InlineRuntime

def scripted(self, config, *, tokenizer):
    call = tokenizer("<tool>" + PROGRAM + "</tool>", add_special_tokens=False)["input_ids"]
    return ScriptedSampler(lambda request: call, end_token_id=tokenizer.eos_token_id)

InlineRuntime.open_sampler = scripted
loaded = load(sys.argv[1:])
write = lambda folder: write_resolved(loaded, folder)
train(loaded.config, digest=loaded.digest, write_config=write)
"""


def written_by(directory: Path, *overrides: str) -> dict[str, str]:
    """Train a policy that calls the tool with PROGRAM; return what the run wrote and printed."""
    command = [sys.executable, "-c", f"PROGRAM = {PROGRAM!r}\n{DRIVER}", *SMALL]
    settings = [
        "environment={name: python, max_turns: 2, max_observation_tokens: 900}",
        "data.tokenizer.kind=bpe",
        "data.tokenizer.vocab_size=300",
        "actor.engine.model.architecture.max_position_embeddings=4096",
        "sampling.max_tokens=700",
        "warm_start=null",
        "rollout.canary=false",
        "batching.prompts_per_step=2",
        "batching.max_tokens=8192",
        "algorithm.group_size=2",
        "run.total_steps=1",
        "run.eval_every=0",
        "run.eval_sampling.max_tokens=700",
        "data.eval.max_rows=2",
        "run.table_every=1",
        "run.report=true",
        "run.num_table_rows=2",
        "+reward.arguments.api_key=${oc.env:JUDGE_KEY}",
        "reward.function=temper_trainer_test_rewards:judged",
    ]
    done = subprocess.run(
        [*command, *settings, f"run.dir={directory}", *overrides],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | SENTINELS | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stderr
    files = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    return {"stdout": done.stdout, "stderr": done.stderr} | {
        name: data.decode("latin-1") for name, data in files.items()
    }


# Nightly: programs that look for secrets are among those of test_escapes.py.
@pytest.mark.nightly
def test_secrets_of_the_trainer_are_not_in_the_files_of_a_run(
    tmp_path: Path, needs_bubblewrap: None
) -> None:
    del needs_bubblewrap
    written = written_by(tmp_path / "run")
    assert "'HOME': '/tmp'" in written["samples.jsonl"], "the program has run"
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "report.html"} <= set(written)
    leaks = {
        name for name, text in written.items() for secret in SENTINELS.values() if secret in text
    }
    assert not leaks


def test_same_program_finds_the_secrets_without_a_sandbox(needs_bubblewrap: None) -> None:
    del needs_bubblewrap  # it looks for Linux's /proc
    driver = (
        "from temper_trainer.environment.sandbox import NoSandbox\n"
        f"print(NoSandbox().run({PROGRAM!r}, timeout_s=60, memory_mib=256).output)"
    )
    done = subprocess.run(
        [sys.executable, "-c", driver],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | SENTINELS,
    )
    assert SENTINELS["HF_TOKEN"] in done.stdout
