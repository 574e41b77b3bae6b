"""Other users of the host cannot read the token of a run's Ray cluster."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.runtime.ray.ray_token import protect_token_file

START = """
from temper_trainer.config.run import RuntimeConfig
from temper_trainer.runtime.ray.ray_runtime import connect_to_ray
connect_to_ray(RuntimeConfig(kind="ray"))
"""


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def get_permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_start_of_ray_makes_a_token_that_only_this_user_can_read(token_file: Path) -> None:
    protect_token_file(is_starting=True)
    assert get_permissions(token_file) == 0o600
    token = token_file.read_text()
    assert len(token) == 64
    protect_token_file(is_starting=True)
    assert token_file.read_text() == token


def test_token_that_others_could_read_is_protected_with_a_warning(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token_file.parent.mkdir()
    token_file.write_text("a" * 64)
    token_file.chmod(0o644)
    protect_token_file(is_starting=False)
    assert get_permissions(token_file) == 0o600
    (message,) = caplog.messages
    assert message.startswith(f"{token_file}, Ray's token, could be read by other users")
    protect_token_file(is_starting=True)
    assert token_file.read_text() == "a" * 64
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "b" * 64), ("RAY_AUTH_TOKEN_PATH", "t")],
)
def test_no_token_is_made_if_ray_would_not_use_it(
    token_file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    protect_token_file(is_starting=True)
    assert not token_file.parent.exists()


def test_run_that_joins_a_cluster_makes_no_token(token_file: Path) -> None:
    protect_token_file(is_starting=False)
    assert not token_file.parent.exists()


def test_token_that_cannot_be_written_is_refused_with_advice(token_file: Path) -> None:
    token_file.parent.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be written: .*set RAY_AUTH_TOKEN"):
        protect_token_file(is_starting=True)


@pytest.mark.ray
# Nightly: starts Ray. The function that makes the token is tested above.
@pytest.mark.nightly
def test_token_of_a_cluster_that_a_run_starts_is_private(token_file: Path) -> None:
    subprocess.run([sys.executable, "-c", START], check=True)
    assert get_permissions(token_file) == 0o600
    assert get_permissions(token_file.parent) == 0o700
