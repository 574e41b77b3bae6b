import logging
from collections.abc import Callable

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load

from .conftest import RL


def test_auto_is_disable_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load([*RL, "use_legacy_worker_impl=auto"])
    assert [record.message for record in caplog.records] == [
        "use_legacy_worker_impl=auto does the same as disable, the engine path, and will be refused in 0.3: remove it."
    ]


def test_disable_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    load([*RL, "use_legacy_worker_impl=disable"])
    assert not caplog.records


def test_enable_without_the_shim_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"no package offers deprecated workers .*: they will come with temper-legacy-shim"):
        load([*RL, "use_legacy_worker_impl=enable"])


def test_enable_with_workers_that_this_release_cannot_drive_is_refused(install: Callable[[str, str], None]) -> None:
    install("[temper.legacy_workers]\nold_actor = guest_engine:Worker\n", "class Worker: ...\n")
    with pytest.raises(ConfigError, match=r"the deprecated workers old_actor are installed, but temper-trainer 0.1 drives engines only"):
        load([*RL, "use_legacy_worker_impl=enable"])
