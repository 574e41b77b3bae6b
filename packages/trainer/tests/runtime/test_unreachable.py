"""A Ray cluster that is not there."""

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load
from temper_trainer.runtime.runtime_factory import open_runtime

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
)


def test_unreachable_ray_address_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(*, address: str, **settings: object) -> None:
        """Raise the error that ``ray.init`` raises after trying for two minutes."""
        raise ConnectionError(f"Failed to connect to Ray cluster at {address}")

    monkeypatch.setattr(ray, "init", gives_up)
    config = load(
        ["experiment=quickstart", "runtime.kind=ray", "runtime.address=127.0.0.1:9"]
    ).config
    with (
        pytest.raises(
            ConfigError,
            match=r"runtime\.address is 127\.0\.0\.1:9, but no Ray cluster answers there",
        ),
        open_runtime(config),
    ):
        pass
