"""Passwords and tokens in a configuration: given by the environment, never written."""

from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load, write_resolved

BASE = ("experiment=quickstart",)


@pytest.mark.parametrize(
    "key", ["api_key", "token", "hf_token", "password", "AWS_SECRET_ACCESS_KEY", "credentials"]
)
def test_a_secret_that_is_written_out_is_refused(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^reward\.arguments\.{key} is a secret in plain text"
    ) as caught:
        load([*BASE, "reward.function=my:judge", f"+reward.arguments.{key}=sentinel"])
    assert f"set reward.arguments.{key}='${{oc.env:{key.upper()}}}'." in str(caught.value)
    assert "sentinel" not in str(caught.value)


def test_a_secret_of_the_environment_reaches_the_function_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE", "sentinel")
    loaded = load([*BASE, "reward.function=my:judge", "+reward.arguments.api_key=${oc.env:JUDGE}"])
    assert loaded.config.reward.arguments["api_key"] == "sentinel"
    write_resolved(loaded, tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert not any("sentinel" in text for text in written.values())
    assert "api_key: ${oc.env:JUDGE}" in written["config.yaml"]
    again = load([], config_dir=str(tmp_path), config_name="config")
    assert (again.config, again.digest) == (loaded.config, loaded.digest)


def test_other_variables_are_written_with_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUNCTION", "my:judge")
    write_resolved(load([*BASE, "reward.function=${oc.env:FUNCTION}"]), tmp_path)
    assert "function: my:judge" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("key", ["end_token", "answer_key", "max_tokens"])
def test_what_only_sounds_like_a_secret_is_written(key: str) -> None:
    loaded = load([*BASE, "reward.function=my:judge", f"+reward.arguments.{key}=x"])
    assert loaded.config.reward.arguments[key] == "x"


def test_an_address_with_a_password_is_refused() -> None:
    given = ["actor.engine.model.path=model"]
    with pytest.raises(
        ConfigError, match=r"^data\.train\.paths is a URL with a password"
    ) as caught:
        load([*given, "data.train.paths=['s3://user:sentinel@bucket/train.jsonl']"])
    assert "sentinel" not in str(caught.value)
    load([*given, "data.train.paths=['s3://bucket/a:b@c/train.jsonl']"])
