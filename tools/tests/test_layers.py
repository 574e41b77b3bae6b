"""Test the import rules that import-linter cannot express."""

import itertools
import sys
from pathlib import Path

import pytest

from tools.layers import (
    build_import_graph,
    check_cycles,
    check_imports,
    find_cycles,
    main,
)


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
def test_every_kind_of_import_is_found(source: str) -> None:
    faults = check_imports("temper_trainer.loops.sync", source)
    assert any(
        "only temper_engine_fsdp" in line and "may import torch.distributed" in line
        for line in faults
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
def test_allowed_modules_and_similar_names_pass(module: str, source: str) -> None:
    assert check_imports(module, source) == []


def test_core_of_engine_api_may_import_only_torch() -> None:
    (fault,) = check_imports("temper_engine_api.batch", "import torch\nimport numpy as np")
    assert "temper_engine_api.batch:2 imports numpy" in fault


@pytest.mark.parametrize(
    "source",
    [
        "import megatron.bridge.training.config",
        "from megatron.bridge import training",
        "from megatron.bridge.training import setup",
    ],
)
def test_no_module_may_import_the_training_program_of_the_bridge(source: str) -> None:
    faults = check_imports("temper_engine_megatron.bridge_compat.bridge_translation", source)
    assert any("no module may import megatron.bridge.training" in line for line in faults)
    assert (
        check_imports(
            "temper_engine_megatron.bridge_compat.bridge_translation",
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
def test_only_the_runtime_may_import_ray(module: str, source: str) -> None:
    (fault,) = check_imports(module, source)
    assert "only temper_trainer.runtime may import ray" in fault
    assert check_imports("temper_trainer.runtime.ray_workers", source) == []


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_the_translator_of_the_shim_does_not_import_torch_in_functions(module: str) -> None:
    (fault,) = check_imports(
        "temper_legacy_shim.configs.mapping.rules", f"def late():\n    import {module}"
    )
    assert f"may import {module}" in fault
    assert (
        check_imports("temper_legacy_shim.checkpoints.huggingface.logits", f"import {module}") == []
    )


def test_a_module_with_a_similar_name_is_not_allowed() -> None:
    assert check_imports("temper_engine_fsdp.adapters", "import peft")
    assert check_imports("temper_engine_api.conformance_report", "import transformers")


def test_command_reports_the_line_of_a_forbidden_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "packages" / "trainer" / "src" / "temper_trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""The trainer."""\n')
    before = list(sys.path)
    assert main([str(tmp_path)]) == 0
    assert sys.path == before
    (package / "__init__.py").write_text('"""The trainer."""\n\nimport peft\n')
    assert main([str(tmp_path)]) == 1
    assert "temper_trainer:3 imports peft" in capsys.readouterr().out


def test_imports_in_functions_and_for_type_checkers_close_a_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cyclic_example"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("def late():\n    from cyclic_example.two import a\n")
    (package / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cyclic_example import one\n"
    )
    (package / "three.py").write_text("import cyclic_example.one\n")
    monkeypatch.syspath_prepend(tmp_path)
    (sentence,) = check_cycles(build_import_graph(["cyclic_example"]), [])
    assert sentence.startswith("import cycle: cyclic_example.")
    assert "three" not in sentence


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\ndef late():\n    importlib.import_module('dynamic_example.one')\n",
        "from importlib import import_module\nimport_module('dynamic_example.one')\n",
        "from importlib import import_module\nimport_module(name='dynamic_example.one')\n",
    ],
)
def test_import_module_with_a_literal_name_closes_a_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    package = tmp_path / "dynamic_example"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("import dynamic_example.two\n")
    (package / "two.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    (sentence,) = check_cycles(build_import_graph(["dynamic_example"]), [])
    assert "dynamic_example.two imports dynamic_example.one" in sentence


def test_import_module_of_another_package_is_no_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "dynamic_third_party"
    package.mkdir()
    (package / "__init__.py").write_text("import importlib\nimportlib.import_module('json')\n")
    monkeypatch.syspath_prepend(tmp_path)
    graph = build_import_graph(["dynamic_third_party"])
    assert graph == {"dynamic_third_party": set()}


def test_every_cycle_is_found() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"], "f": ["a"]}
    cycles = find_cycles(graph)
    assert sorted(sorted(cycle[1:]) for cycle in cycles) == [["a", "b", "c"], ["d", "e"]]
    assert all(
        importer in graph and imported in graph[importer]
        for cycle in cycles
        for importer, imported in itertools.pairwise(cycle)
    )


def test_a_cycle_inside_an_exempt_package_is_allowed_and_one_that_leaves_it_is_not() -> None:
    assert check_cycles({"old.a": ["old.b"], "old.b": ["old.a"]}, ["old"]) == []
    (sentence,) = check_cycles({"old.a": ["new.b"], "new.b": ["old.a"]}, [])
    assert sentence.startswith("import cycle: ")


def test_exemption_without_a_cycle_is_reported() -> None:
    (sentence,) = check_cycles({"old.a": ["old.b"], "old.b": []}, ["old"])
    assert sentence.startswith("old has no import cycle: delete its line")


def test_folder_without_packages_fails(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1
