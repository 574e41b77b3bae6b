"""Test entry points with a distribution of a healthy, a broken and a wrong engine."""

import subprocess
import sys
from pathlib import Path

import pytest

from temper_engine_api.errors import EngineNotFoundError
from temper_engine_api.registry import (
    EngineEntry,
    find_import_errors,
    list_engines,
    load_engine_class,
    load_engine_config_class,
)

ENTRY_POINTS = """\
[temper.engines]
healthy = acme_engine:HealthyEngine
broken = acme_broken:BrokenEngine
misspelt = acme_engine:HaelthyEngine
wrong = acme_engine:HealthyConfig

[temper.engine_configs]
healthy = acme_config:HealthyConfig
wrong = acme_engine:HealthyEngine
"""
CONFIG = (
    "from temper_engine_api.specs import EngineConfig\n\n\n"
    "class HealthyConfig(EngineConfig):\n    pass\n"
)
ENGINE = """\
from acme_config import HealthyConfig
from temper_engine_api.engine import BaseEngine


class HealthyEngine(BaseEngine):
    pass
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a distribution of three engines."""
    info = tmp_path / "acme_engines-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engines\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "acme_config.py").write_text(CONFIG)
    (tmp_path / "acme_engine.py").write_text(ENGINE)
    (tmp_path / "acme_broken.py").write_text("import acme_kernels_that_are_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("acme_config", "acme_engine", "acme_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


@pytest.mark.usefixtures("acme")
def test_listing_names_every_engine_and_imports_none() -> None:
    entries = {entry.name: entry for entry in list_engines()}
    assert entries["broken"] == EngineEntry(
        name="broken", target="acme_broken:BrokenEngine", distribution="acme-engines 1.2"
    )
    assert {"healthy", "misspelt", "wrong"} <= entries.keys()
    assert not {"acme_engine", "acme_broken"} & sys.modules.keys()


@pytest.mark.usefixtures("acme")
def test_looking_up_imports_the_engine() -> None:
    assert load_engine_class("healthy").__name__ == "HealthyEngine"


@pytest.mark.usefixtures("acme")
def test_a_configuration_is_found_without_its_engine() -> None:
    assert load_engine_config_class("healthy").__name__ == "HealthyConfig"
    assert "acme_engine" not in sys.modules


@pytest.mark.usefixtures("acme")
def test_an_engine_that_can_not_be_imported_says_why() -> None:
    with pytest.raises(
        EngineNotFoundError,
        match=r"'broken' of acme-engines 1.2 .*No module named 'acme_kernels_that_are_missing'",
    ):
        load_engine_class("broken")
    with pytest.raises(EngineNotFoundError, match=r"'misspelt' .*HaelthyEngine"):
        load_engine_class("misspelt")


@pytest.mark.usefixtures("acme")
def test_every_fault_is_listed_with_its_reason() -> None:
    faults = find_import_errors()
    assert {"broken", "misspelt", "wrong"} <= faults.keys()
    assert "healthy" not in faults
    assert "acme_kernels_that_are_missing" in faults["broken"]


@pytest.mark.usefixtures("acme")
def test_a_class_of_another_kind_is_refused() -> None:
    with pytest.raises(
        EngineNotFoundError,
        match=r"'wrong' is .*HealthyConfig.*, which is not a subclass of BaseEngine",
    ):
        load_engine_class("wrong")
    with pytest.raises(
        EngineNotFoundError,
        match=r"configuration of engine 'wrong' is .*HealthyEngine.*, which is not a subclass of "
        "EngineConfig",
    ):
        load_engine_config_class("wrong")


@pytest.mark.usefixtures("acme")
def test_an_unknown_name_says_what_is_installed() -> None:
    with pytest.raises(
        EngineNotFoundError,
        match=r"no engine is called 'fdsp'; installed are: .*healthy.*Correct the name",
    ):
        load_engine_class("fdsp")


@pytest.mark.parametrize(
    "module", ["specs", "errors", "registry", "topology", "schedule", "capabilities"]
)
def test_what_a_configuration_needs_is_imported_without_torch(module: str) -> None:
    code = f"import sys, temper_engine_api.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
