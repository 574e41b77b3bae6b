import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from forked_processes import run_program

import temper_legacy_shim
from temper_engine_api.errors import ConfigError
from temper_legacy_shim import old_paths
from temper_legacy_shim.errors import UsageError
from temper_legacy_shim.old_paths import MODULES, PACKAGE


@pytest.fixture(autouse=True)
def no_old_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    old_paths.uninstall()


def test_importing_the_shim_installs_nothing() -> None:
    code = (
        "import temper_legacy_shim.workers, sys; sys.exit(any(name.partition('.')[0] == 'verl' "
        "for name in sys.modules))"
    )
    assert run_program(code).returncode == 0


def test_after_install_old_imports_find_the_deprecated_classes() -> None:
    temper_legacy_shim.install()
    old_paths.install()
    workers = importlib.import_module("temper_legacy_shim.workers")
    assert importlib.import_module("verl.workers.fsdp_workers").CriticWorker is workers.CriticWorker
    assert (
        importlib.import_module("verl.workers.actor").DataParallelPPOActor
        is workers.DataParallelPPOActor
    )
    assert (
        importlib.import_module("verl.workers.critic.dp_critic").DataParallelPPOCritic
        is workers.DataParallelPPOCritic
    )
    assert (
        importlib.import_module("verl").DataProto
        is importlib.import_module("verl.protocol").DataProto
    )
    megatron = importlib.import_module("verl.workers.megatron_workers")
    assert megatron.CriticWorker is not workers.CriticWorker


def test_every_name_that_is_offered_exists() -> None:
    old_paths.install()
    for name, offers in MODULES.items():
        for attribute in offers:
            assert callable(getattr(sys.modules[name], attribute))


def test_the_old_bases_are_there_for_subclasses_and_isinstance() -> None:
    old_paths.install()
    actor, critic = (
        importlib.import_module("verl.workers.actor"),
        importlib.import_module("verl.workers.critic"),
    )
    megatron = importlib.import_module("verl.workers.megatron_workers")
    assert importlib.import_module("verl.workers.actor.base").BasePPOActor is actor.BasePPOActor
    assert importlib.import_module("verl.workers.critic.base").BasePPOCritic is critic.BasePPOCritic
    assert issubclass(actor.DataParallelPPOActor, actor.BasePPOActor)
    assert issubclass(critic.DataParallelPPOCritic, critic.BasePPOCritic)
    assert issubclass(
        importlib.import_module("verl.workers.actor.megatron_actor").MegatronPPOActor,
        actor.BasePPOActor,
    )
    assert issubclass(megatron.CriticWorker, megatron.MegatronWorker)

    class Derived(actor.BasePPOActor):  # type: ignore[misc, name-defined]
        def compute_log_prob(self, data: object) -> object:
            return data

    with pytest.raises(TypeError, match="update_policy"):
        Derived({})
    with pytest.raises(ConfigError, match=r"MegatronWorker .* MegatronEngine"):
        megatron.MegatronWorker()


def test_a_name_that_is_not_offered_is_refused_with_what_is() -> None:
    old_paths.install()
    with pytest.raises(
        AttributeError,
        match=r"verl.protocol has no 'DataProtoFuture' here: .* offers DataProto, DataProtoItem",
    ):
        _ = importlib.import_module("verl.protocol").DataProtoFuture
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.trainer")


def test_uninstall_forgets_the_old_paths() -> None:
    old_paths.install()
    old_paths.uninstall()
    assert not old_paths.is_installed()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.protocol")


def test_the_real_package_is_not_hidden_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text("DataProto = 'the real one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="verl itself is installed here"):
        old_paths.install()
    assert importlib.import_module(PACKAGE).DataProto == "the real one"
    with pytest.raises(UsageError, match="verl itself was already imported"):
        old_paths.install()
    real = sys.modules[PACKAGE]
    assert isinstance(real, ModuleType)
    old_paths.install(force=True)
    assert importlib.import_module("verl").DataProto != "the real one"
    monkeypatch.delitem(sys.modules, PACKAGE)
