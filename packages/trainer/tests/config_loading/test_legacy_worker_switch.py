import logging
from collections.abc import Callable

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load, loading
from temper_trainer.config_loading.loading import normalize_worker_switch

from .conftest import RL, SFT


def test_auto_equals_disable_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load([*RL, "use_legacy_worker_impl=auto"])
    assert [record.message for record in caplog.records] == [
        (
            "use_legacy_worker_impl=auto is the same as disable and will be rejected from "
            "0.3 on: remove it."
        )
    ]


def test_disable_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    load([*RL, "use_legacy_worker_impl=disable"])
    assert not caplog.records


def test_booleans_are_accepted_as_enable_and_disable(caplog: pytest.LogCaptureFixture) -> None:
    assert load([*RL, "use_legacy_worker_impl=false"]).config.use_legacy_worker_impl == "disable"
    assert normalize_worker_switch(True) == "enable"
    assert normalize_worker_switch("auto") == "auto"
    with pytest.raises(
        ConfigError, match=r"use_legacy_worker_impl is 1, but must be auto, enable or disable"
    ):
        load([*RL, "use_legacy_worker_impl=1"])


def test_enable_without_the_shim_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LEGACY_WORKER_GROUP", "temper.a_group_that_nobody_fills")
    with pytest.raises(
        ConfigError,
        match=(
            r"no installed package provides the deprecated workers .*: run pip install "
            r"'\./packages/legacy-shim\[workers\]' in a clone of Temper"
        ),
    ):
        load([*RL, "use_legacy_worker_impl=enable"])


def test_enable_is_refused_if_no_role_could_use_it(install: Callable[[str, str], None]) -> None:
    install(
        "[temper.legacy_workers]\ntraining_worker = third_party_engine:Worker\n",
        "class Worker: ...\n",
    )
    with pytest.raises(
        ConfigError, match="enable in task sft, which the deprecated workers do not support"
    ):
        load([*SFT, "use_legacy_worker_impl=true"])
    assert load([*RL, "use_legacy_worker_impl=true"]).config.use_legacy_worker_impl == "enable"


def test_enable_on_another_engine_is_refused_naming_both_keys(
    install: Callable[[str, str], None],
) -> None:
    pytest.importorskip(
        "temper_engine_megatron",
        reason="needs temper-engine-megatron: an environment with both engines runs this",
    )
    install(
        "[temper.legacy_workers]\ntraining_worker = third_party_engine:Worker\n",
        "class Worker: ...\n",
    )
    with pytest.raises(
        ConfigError, match="megatron, but temper-train runs the deprecated workers only on fsdp"
    ):
        load([*RL, "model_engine=megatron", "use_legacy_worker_impl=enable"])
