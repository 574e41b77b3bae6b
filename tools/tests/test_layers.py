"""The import rules that import-linter cannot express."""

from pathlib import Path

import pytest

from tools.layers import SHIM_WITH_TORCH, complaints, main
from tools.needs import NEEDS_EXTRA


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "def late():\n    import torch.distributed.checkpoint",
        "import torch\nrank = torch.distributed.get_rank()",
        "import importlib\nimportlib.import_module('torch.distributed')",
    ],
)
def test_every_way_to_reach_a_guest_is_seen(source: str) -> None:
    found = complaints("temper_trainer.loops.sync", source)
    assert any(
        "only temper_engine_fsdp" in line and "may import torch.distributed" in line
        for line in found
    )


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("temper_engine_fsdp.mesh", "import torch.distributed"),
        ("temper_engine_api.checkpoint.transaction", "import torch.distributed"),
        (
            "temper_engine_api.conformance.harness.rank_pool",
            "import torch.distributed, peft, transformers, pytest",
        ),
        ("temper_engine_fsdp.training.lora_adapter", "from peft import LoraConfig"),
        ("temper_trainer.rollout.vllm", "import vllm"),
        (
            "temper_engine_api.batch",
            "import os.path\nimport torch\nfrom typing_extensions import Self",
        ),
        (
            "temper_engine_api.batch",
            "from temper_engine_api.errors import BatchError\nfrom . import plan",
        ),
        ("temper_trainer.loops.sync", "import torch.distributions\nimport peftlike"),
    ],
)
def test_hosts_and_namesakes_are_left_alone(module: str, source: str) -> None:
    assert complaints(module, source) == []


def test_the_contracts_core_may_import_nothing_but_torch() -> None:
    (found,) = complaints("temper_engine_api.batch", "import torch\nimport numpy as np")
    assert "temper_engine_api.batch:2 imports numpy" in found


@pytest.mark.parametrize(
    "source",
    [
        "import megatron.bridge.training.config",
        "from megatron.bridge import training",
        "from megatron.bridge.training import setup",
    ],
)
def test_the_bridges_training_program_has_no_host(source: str) -> None:
    found = complaints("temper_engine_megatron.bridge_compat.translation", source)
    assert any("nobody may import megatron.bridge.training" in line for line in found)
    assert (
        complaints(
            "temper_engine_megatron.bridge_compat.translation",
            "from megatron.bridge.models import conversion",
        )
        == []
    )


@pytest.mark.parametrize(
    "module",
    [
        "temper_trainer.reward.worker",
        "temper_legacy_shim.workers.fsdp_workers",
        "temper_engine_fsdp.mesh",
    ],
)
@pytest.mark.parametrize(
    "source",
    ["def late():\n    import ray", "import importlib\nray = importlib.import_module('ray')"],
)
def test_ray_has_its_door_in_the_runtime_alone_by_whatever_way_and_in_every_package(
    module: str, source: str
) -> None:
    (found,) = complaints(module, source)
    assert "only temper_trainer.runtime may import ray" in found
    assert complaints("temper_trainer.runtime.ray_workers", source) == []


@pytest.mark.parametrize("guest", ["torch", "transformers"])
def test_the_shims_translator_does_not_even_import_torch_later(guest: str) -> None:
    (found,) = complaints("temper_legacy_shim.configs.rules", f"def late():\n    import {guest}")
    assert f"may import {guest}" in found
    assert complaints("temper_legacy_shim.checkpoints.dcp", f"import {guest}") == []


def test_the_shims_rooms_with_torch_are_those_that_an_extra_makes_importable() -> None:
    assert set(SHIM_WITH_TORCH) == set(NEEDS_EXTRA["legacy-shim"])


def test_a_modules_namesake_is_not_its_host() -> None:
    assert complaints("temper_engine_fsdp.adapters", "import peft")
    assert complaints("temper_engine_api.conformance_report", "import transformers")


def test_the_command_fails_on_a_bad_tree_and_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "packages" / "trainer" / "src" / "temper_trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""The trainer."""\n')
    assert main([str(tmp_path)]) == 0
    (package / "__init__.py").write_text('"""The trainer."""\n\nimport peft\n')
    assert main([str(tmp_path)]) == 1
    assert "temper_trainer:3 imports peft" in capsys.readouterr().out


def test_a_folder_without_packages_is_not_a_pass(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1
