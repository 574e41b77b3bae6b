"""DAPO's penalty of long completions, by the code of verl 0.7.0 and by the translation.

The release's wheel is downloaded, and its reward manager runs in a process of its own. The packages
around it need a sampler on GPUs to import, so they are replaced by folders without ``__init__.py``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

pytest.importorskip("temper_trainer", reason="needs temper-trainer, whose penalty is compared")

from temper_trainer.config.reward import OverlongConfig
from temper_trainer.reward.scoring import compute_overlong_penalty

from .conftest import translated, values

RESPONSE_TOKENS = 1024
LENGTHS = (1, 512, 513, 700, 1024)

MANAGER = """
import asyncio, importlib, json, sys, types
import torch
from omegaconf import OmegaConf
from temper_legacy_shim.data_proto import DataProto

def folder(name):
    module = types.ModuleType(name)
    module.__path__ = [f"{sys.argv[1]}/{name.replace('.', '/')}"]
    sys.modules[name] = module
    return module

folder("verl").DataProto = DataProto
folder("verl.utils")
folder("verl.experimental")
folder("verl.experimental.reward_loop")
managers = folder("verl.experimental.reward_loop.reward_manager")
managers.register = importlib.import_module(managers.__name__ + ".registry").register
dapo = importlib.import_module(managers.__name__ + ".dapo")

class Tokenizer:
    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens.tolist()))

def score(**_):
    return 1.0

async def rewards(config, lengths, width):
    manager = dapo.DAPORewardManager(config, Tokenizer(), compute_score=score)
    result = []
    for length in lengths:
        mask = (torch.arange(width) < length).long()[None]
        row = DataProto.from_dict(
            tensors={"responses": torch.zeros_like(mask), "attention_mask": mask},
            non_tensors={"data_source": ["x"], "reward_model": [{"ground_truth": "1"}]},
        )
        result.append(float((await manager.run_single(row))["reward_score"]))
    return result

block, lengths, width = json.loads(sys.argv[2])
print(json.dumps(asyncio.run(rewards(OmegaConf.create({"reward_model": block}), lengths, width))))
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the package of verl 0.7.0."""
    folder = tmp_path_factory.mktemp("verl")
    command = ("-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder))
    got = subprocess.run(
        [sys.executable, *command, "verl==0.7.0"], check=False, capture_output=True, text=True
    )
    if got.returncode:
        pytest.skip(f"needs a package index that has verl 0.7.0: {got.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    ZipFile(wheel).extractall(folder)
    return folder


def rewards_by_release(release: Path, block: dict[str, object]) -> list[float]:
    """Return the rewards of completions whose function gives 1, by the length of each."""
    given = json.dumps([block, LENGTHS, RESPONSE_TOKENS])
    got = subprocess.run(
        [sys.executable, "-c", MANAGER, str(release), given],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert got.returncode == 0, got.stderr[-2000:]
    result: list[float] = json.loads(got.stdout)
    return result


def rewards_by_translation(*overrides: str) -> list[float]:
    """Return the same rewards as the translated run gives them."""
    new = values(
        translated(
            "v0.7.0",
            f"data.max_response_length={RESPONSE_TOKENS}",
            "reward_model.reward_manager=dapo",
            *overrides,
            entry="recipe.dapo.main_dapo",
        )
    )
    tokens = new.get("reward.shaping.overlong.buffer_tokens")
    if tokens is None:
        return [1.0 for _ in LENGTHS]
    penalty = new["reward.shaping.overlong.penalty"]
    config = OverlongConfig(buffer_tokens=tokens, penalty=penalty)  # type: ignore[arg-type]
    return [
        1.0 + compute_overlong_penalty(length, max_tokens=RESPONSE_TOKENS, config=config)
        for length in LENGTHS
    ]


BUFFER = {"enable": True, "len": 512, "penalty_factor": 0.5, "log": False}


# Nightly: downloads a release of verl.
@pytest.mark.nightly
def test_block_of_dapo_program_subtracts_nothing(release: Path) -> None:
    old = rewards_by_release(release, {"overlong_buffer": BUFFER})
    overrides = [f"+reward_model.overlong_buffer.{key}={value}" for key, value in BUFFER.items()]
    assert old == [1.0] * len(LENGTHS)
    assert rewards_by_translation(*overrides) == old


# Nightly: downloads a release of verl, as above.
@pytest.mark.nightly
def test_block_of_the_manager_subtracts_as_much_as_the_translation(release: Path) -> None:
    kwargs = {"overlong_buffer_cfg": BUFFER, "max_resp_len": RESPONSE_TOKENS}
    old = rewards_by_release(release, {"reward_kwargs": kwargs})
    prefix = "+reward_model.reward_kwargs"
    overrides = [f"{prefix}.overlong_buffer_cfg.{key}={value}" for key, value in BUFFER.items()]
    new = rewards_by_translation(*overrides, f"{prefix}.max_resp_len={RESPONSE_TOKENS}")
    assert old[0] == old[1] == 1.0
    assert old[-1] == 0.5
    assert new == pytest.approx(old, abs=1e-6)


# Nightly: downloads a release of verl, as above.
@pytest.mark.nightly
def test_reward_loop_is_on_by_default(release: Path) -> None:
    text = (release / "verl/trainer/config/reward_model/dp_reward_loop.yaml").read_text()
    assert "use_reward_loop: True" in text
    assert "dp_reward_loop" in (release / "verl/trainer/config/ppo_trainer.yaml").read_text()
