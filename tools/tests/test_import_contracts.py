"""Test that each import contract of pyproject.toml fails for a small tree that breaks it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "temper_engine_api",
    "temper_engine_fsdp",
    "temper_engine_megatron",
    "temper_legacy_shim",
    "temper_trainer",
)

SOURCES_WITHOUT_ALGORITHMS = ("batching", "data", "environment", "reward", "teacher")

ALLOWED = {
    "temper_trainer/__main__.py": "import hydra\nfrom temper_trainer import config_loading, loops",
    "temper_trainer/config_loading.py": "import omegaconf\nimport temper_trainer.config",
    "temper_trainer/loops/sync.py": (
        "import temper_trainer.runtime.workers, temper_trainer.algorithms.value_loss"
    ),
    "temper_trainer/runtime/workers.py": (
        "import ray\nimport temper_trainer.rollout.hf, temper_trainer.types"
    ),
    "temper_trainer/rollout/hf.py": (
        "import temper_trainer.metrics, temper_trainer.config, temper_engine_api"
    ),
    "temper_trainer/algorithms/value_loss.py": "import torch",
    "temper_trainer/metrics.py": "import temper_trainer.types",
    "temper_trainer/types.py": "import temper_trainer.config",
    "temper_trainer/settings/ranges.py": "",
    **dict.fromkeys(
        (f"temper_trainer/{folder}/a.py" for folder in SOURCES_WITHOUT_ALGORITHMS),
        "import temper_trainer.types",
    ),
    "temper_trainer/config/run.py": "",
    "temper_engine_fsdp/engine.py": "import temper_engine_api",
    "temper_engine_fsdp/sharding/fsdp2.py": "import temper_engine_fsdp.model.attention",
    "temper_engine_fsdp/model/attention.py": "",
    "temper_legacy_shim/workers.py": (
        "import temper_trainer, temper_engine_fsdp\nimport temper_legacy_shim.errors"
    ),
    "temper_legacy_shim/errors.py": "",
    "temper_legacy_shim/cli.py": "import temper_legacy_shim.workers",
}


def _broken_contracts(folder: Path, files: dict[str, str]) -> list[str]:
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name in (*(f"{package}/__init__.py" for package in PACKAGES), *files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(files.get(name, ""))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as c; c()",
            "--no-cache",
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = dict(re.findall(r"^(\w.*?) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    assert len(outcomes) == 9, done.stdout + done.stderr
    return [name for name, outcome in outcomes.items() if outcome == "BROKEN"]


def test_allowed_imports_keep_every_contract(tmp_path: Path) -> None:
    assert _broken_contracts(tmp_path, ALLOWED) == []


FORBIDDEN = {
    "Packages import": [
        ("temper_engine_api/extra.py", "import temper_engine_fsdp"),
        ("temper_engine_fsdp/extra.py", "import temper_trainer"),
        ("temper_trainer/loops/extra.py", "import temper_engine_fsdp"),
    ],
    "Folders of engine-fsdp": [
        ("temper_engine_fsdp/model/extra.py", "import temper_engine_fsdp.sharding.fsdp2"),
    ],
    "Folders of the trainer": [
        ("temper_trainer/runtime/extra.py", "import temper_trainer.loops.sync"),
        ("temper_trainer/config/extra.py", "import temper_trainer.metrics"),
    ],
    "The configuration imports no types": [
        ("temper_trainer/config/extra.py", "import temper_trainer.types"),
    ],
    "Sampling, rewards and data": [
        ("temper_trainer/rollout/extra.py", "import temper_trainer.algorithms"),
    ],
    "Hydra and OmegaConf": [
        ("temper_trainer/config/extra.py", "def late():\n    import omegaconf"),
        ("temper_trainer/loops/extra.py", "from hydra import compose"),
    ],
    "Ray is": [
        ("temper_trainer/loops/extra.py", "import ray"),
        ("temper_engine_fsdp/extra.py", "import ray.util"),
    ],
    "Modules of legacy-shim": [
        ("temper_legacy_shim/checkpoints/extra.py", "import temper_legacy_shim.workers"),
        ("temper_legacy_shim/errors.py", "import temper_legacy_shim.cli"),
    ],
}
"""Files with an import that a contract forbids, by the first words of the contract's name."""


@pytest.mark.parametrize(
    ("contract", "file", "source"),
    [(contract, *case) for contract, cases in FORBIDDEN.items() for case in cases],
)
def test_forbidden_import_breaks_its_contract(
    tmp_path: Path, contract: str, file: str, source: str
) -> None:
    broken = _broken_contracts(tmp_path, ALLOWED | {file: source})
    (name,) = broken
    assert name.startswith(contract)
