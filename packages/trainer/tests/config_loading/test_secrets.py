"""Passwords and tokens in a configuration: given by the environment, never written."""

import traceback
from base64 import b64encode
from importlib.resources import files
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading import load, write_resolved
from temper_trainer.config_loading.schema import flatten, iterate_entries, list_classes
from temper_trainer.config_loading.secrets import (
    _is_secret,
    _names_secret,
    check_secrets,
    redact_override,
)

BASE = ("experiment=quickstart",)


@pytest.mark.parametrize(
    "key", ["api_key", "token", "hf_token", "password", "AWS_SECRET_ACCESS_KEY", "credentials"]
)
def test_secret_given_literally_is_refused(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^reward\.arguments\.{key} is a secret in plain text"
    ) as caught:
        load([*BASE, "reward.function=my:judge", f"+reward.arguments.{key}=sentinel"])
    assert f"set reward.arguments.{key}='${{oc.env:{key.upper()}}}'." in str(caught.value)
    assert "sentinel" not in str(caught.value)


def test_secret_from_the_environment_reaches_the_function_but_no_file(
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
def test_names_that_resemble_secrets_are_written(key: str) -> None:
    loaded = load([*BASE, "reward.function=my:judge", f"+reward.arguments.{key}=x"])
    assert loaded.config.reward.arguments[key] == "x"


@pytest.mark.parametrize(
    "override",
    [
        "reward.arguments.api_key=sentinel-1,sentinel-2",  # several values
        "reward.arguments.api_key=[sentinel",  # cannot be parsed
        "+reward.arguments={name: judge, api_key: sentinel",
        "+'reward.arguments.api_key'=sentinel(",
        "wandb_token=sentinel,b",  # no key of the configuration
        "data.train.paths=https://user:sentinel@host/a,b",
        "data.train.paths=https://host/a?token=sentinel,b",
        "run.dir=hf_sentinel4567890123456789,b",
        "hf_sentinel4567890123456789",
        "run.dir=from-the-environment-sentinel,b",
    ],
)
def test_no_message_repeats_a_secret_of_the_command_line(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "from-the-environment-sentinel")
    with pytest.raises(ConfigError) as caught:
        load([*BASE, "reward.function=my:judge", override])
    assert "sentinel" not in "".join(traceback.format_exception(caught.value))
    assert "sentinel" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    ["run.dir=a,b", "data.prompt_key=x,y", "reward.arguments.api_key=${oc.env:JUDGE}", "", "1=2"],
)
def test_other_overrides_are_repeated(override: str) -> None:
    assert redact_override(override) == override


def test_address_with_a_password_is_refused() -> None:
    given = ["actor.engine.model.path=model"]
    with pytest.raises(
        ConfigError, match=r"^data\.train\.paths is a URL with a password"
    ) as caught:
        load([*given, "data.train.paths=['s3://user:sentinel@bucket/train.jsonl']"])
    assert "sentinel" not in str(caught.value)
    load([*given, "data.train.paths=['s3://bucket/a:b@c/train.jsonl']"])


@pytest.mark.parametrize(
    "key",
    [
        "auth",
        "Authorization",
        "bearer",
        "passphrase",
        "pwd",
        "jwt",
        "pat",
        "cookie",
        "dsn",
        "webhook",
        "webhook_url",
        "openai_key",
        "signing_key",
        "github_token",
        "session_token",
        "bot_token",
        "botToken",
        "pass",
        "db_pass",
        "llm_key",
        "user_token",
        "api_key_2",
        "key",
        "apikey",
        "api_keys",
        "mypassword",
        "password_of_judge",
        "access_key_id",
        "client_secret_value",
    ],
)
def test_more_names_of_secrets_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="is a secret in plain text") as caught:
        load([*BASE, "reward.function=my:judge", f"+reward.arguments.{key}=sentinel"])
    assert "sentinel" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "variable"),
    [
        ("${oc.env:HF_TOKEN}", "HF_TOKEN"),
        ("Bearer ${oc.env:HF_TOKEN}", "HF_TOKEN"),
        ("${oc.env:OPENAI_API_KEY,none}", "OPENAI_API_KEY"),
        ("${oc.env:DB_PASSWORD}", "DB_PASSWORD"),
        ("${oc.env:SERVICE_AUTH}", "SERVICE_AUTH"),
        ("${oc.env:SESSION_COOKIE}", "SESSION_COOKIE"),
        ("${oc.env:AWS_CREDENTIALS}", "AWS_CREDENTIALS"),
        ("https://judge/v1?token=${oc.env:HF_TOKEN}", "HF_TOKEN"),
        ("https://${oc.env:HF_TOKEN}@judge/v1", "HF_TOKEN"),
        ("${oc.env:HF_TOKEN2}", "HF_TOKEN2"),
        ("Bearer ${oc.env:API_KEY2}", "API_KEY2"),
        ("${oc.env:GITHUB_PASSWORD1}", "GITHUB_PASSWORD1"),
        ("${oc.env:OPENAI_APIKEYS}", "OPENAI_APIKEYS"),
        ("${oc.env:OPENAI_KEYS}", "OPENAI_KEYS"),
        ("${oc.env:MY_TOKENS_3}", "MY_TOKENS_3"),
    ],
)
def test_variable_with_the_name_of_a_secret_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, variable: str
) -> None:
    monkeypatch.setenv(variable, "sentinel")
    keys = ("note", "auth")
    arguments = [f"+reward.arguments.{key}='{given}'" for key in keys]
    loaded = load([*BASE, "reward.function=my:judge", *arguments])
    for key in keys:
        assert "sentinel" in str(loaded.config.reward.arguments[key])
        assert loaded.resolved["reward"]["arguments"][key] == given  # type: ignore[index,call-overload]
    write_resolved(loaded, tmp_path)
    assert not any("sentinel" in path.read_text() for path in tmp_path.iterdir())
    again = load([], config_dir=str(tmp_path), config_name="config")
    assert (again.config, again.digest) == (loaded.config, loaded.digest)


def test_secret_in_a_list_or_behind_another_key_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "sentinel")
    loaded = load(
        [
            "actor.engine.model.path=model",
            "data.train.paths=['a.jsonl','https://host/${oc.env:HF_TOKEN}/b.jsonl']",
            "reward.function=my:judge",
            "+reward.arguments.note='x ${reward.arguments.other}'",
            "+reward.arguments.other='${oc.env:HF_TOKEN}'",
        ]
    )
    write_resolved(loaded, tmp_path)
    assert not any("sentinel" in path.read_text() for path in tmp_path.iterdir())
    again = load([], config_dir=str(tmp_path), config_name="config")
    assert (again.config, again.digest) == (loaded.config, loaded.digest)


def test_variable_with_a_harmless_name_and_the_value_of_a_token_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE", "hf_" + "sentinel123" * 3)
    write_resolved(
        load([*BASE, "reward.function=my:judge", "+reward.arguments.note=${oc.env:JUDGE}"]),
        tmp_path,
    )
    assert "note: ${oc.env:JUDGE}" in (tmp_path / "config.yaml").read_text()


def test_working_directory_is_written_with_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", "/somewhere")
    write_resolved(load([*BASE, "run.dir=${oc.env:PWD}/run"]), tmp_path)
    assert "dir: /somewhere/run" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + "sentinel123" * 3,
        "sk-proj-sentinel1234567890",
        "ghp_" + "sentinel123" * 3,
        "AKIA" + "SENTINEL12345678",
        "Bearer sk-sentinel1234567890",
        "https://judge/v1?api_key=sentinel",
        "https://judge/v1?model=a&token=sentinel",
        "https://user:sentinel@judge/v1",
        "https://judge/v1?api-key=sentinel",
        "https://judge/v1?a=b&subscription-key=sentinel",
        "https://judge/v1?X-Amz-Credential=sentinel",
        "https://sentinel4567@judge/v1",
        "git+https://sentinel4567@judge/v1",
        "https://hooks.slack.com/services/T1/B2/sentinel",
        "https://discord.com/api/webhooks/123/sentinel",
        "https://example.com/webhooks/sentinel1234567890",
        "https://api.telegram.org/bot123:sentinel/send",
        "Authorization: Bearer sentinel",
        '"Authorization": "Basic sentinel"',
        "x-api-key: sentinel",
        "Bearer sentinel1234567890",
        "npm_" + "sentinel123" * 3,
        "gsk_" + "sentinel123" * 3,
        "r8_" + "sentinel123" * 3,
        "tgp_v1_" + "sentinel123" * 3,
        "xai-" + "sentinel123" * 3,
        "sk_live_" + "sentinel123" * 3,
        "nvapi-" + "sentinel123" * 3,
    ],
)
def test_value_that_looks_like_a_token_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.arguments\.note is a ") as caught:
        load([*BASE, "reward.function=my:judge", f"+reward.arguments.note='{value}'"])
    assert "sentinel" not in str(caught.value).lower()


@pytest.mark.parametrize(
    "value",
    [
        "ssh://git@github.com/a/b",
        "https://git@github.com/a/b",
        "https://judge/v1?mail=a@b.c&max_tokens=5&sort_key=x",
        "https://judge/hooks/temper",
        "s3://bucket/a@b",
        "runs/r8_lora_rank8_alpha16_seed1",
        "the bearer of this letter",
        "Use bearer authentication.",
        "authorization is not needed",
        "sk-learn",
    ],
)
def test_values_that_resemble_secrets_are_written(value: str) -> None:
    loaded = load([*BASE, "reward.function=my:judge", f"+reward.arguments.note='{value}'"])
    assert loaded.resolved["reward"]["arguments"]["note"] == value  # type: ignore[index,call-overload]
    assert redact_override(f"note={value}") == f"note={value}"


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:NOTSET,sentinel}",
        "${oc.env:NOTSET,${oc.env:NEITHER,sentinel}}",
        "sentinel${oc.env:JUDGE}",
        "Bearer ${oc.env:JUDGE}sentinel",
    ],
)
def test_literal_part_of_a_secret_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "x")
    with pytest.raises(ConfigError, match="is a secret in plain text") as caught:
        load([*BASE, "reward.function=my:judge", f"+reward.arguments.api_key='{value}'"])
    assert "sentinel" not in str(caught.value)
    assert "sentinel" not in redact_override(f"+reward.arguments.api_key='{value}'")


@pytest.mark.parametrize("inserted", ["plain-sentinel", b64encode(b"me:plain-sentinel").decode()])
def test_value_of_a_secret_variable_that_the_shell_expanded_is_refused(
    inserted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "plain-sentinel")
    with pytest.raises(
        ConfigError, match=r"reward\.arguments\.note .*environment variable MY_TOKEN"
    ) as caught:
        load([*BASE, "reward.function=my:judge", f"+reward.arguments.note='a {inserted} b'"])
    assert inserted not in str(caught.value)


def test_path_that_a_secret_variable_names_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key.json"
    file.touch()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    loaded = load([*BASE, "reward.function=my:judge", f"+reward.arguments.note={file}"])
    assert loaded.config.reward.arguments["note"] == str(file)


def test_secret_in_a_nested_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a secret in plain text") as caught:
        load(
            [
                *BASE,
                "reward.function=my:judge",
                "+reward.arguments.headers={Authorization: sentinel}",
            ]
        )
    assert "sentinel" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "tokenizer",
        "prompt_key",
        "answer_key",
        "route_key",
        "loss_weight_key",
        "difficulty_key",
        "num_key_value_heads",
        "pattern",
        "stop_tokens",
        "pad_token",
        "author",
        "path",
        "compatible",
        "messages_key",
        "keys",
        "pad_token_id",
        "token_budget",
        "pass_rate",
        "key_path",
    ],
)
def test_harmless_names_are_written(key: str) -> None:
    loaded = load([*BASE, "reward.function=my:judge", f"+reward.arguments.{key}=x"])
    assert loaded.config.reward.arguments[key] == "x"


def test_no_key_of_the_built_in_configurations_is_a_secret() -> None:
    conf = Path(str(files("temper_trainer"))) / "conf"
    config_files = sorted(conf.rglob("*.yaml"))
    assert len(config_files) > 5
    for path in config_files:
        tree = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(tree, dict)
        check_secrets(tree)  # type: ignore[arg-type]
        for key in flatten(tree):  # type: ignore[arg-type]
            assert not _is_secret(f"reward.arguments.{key.rpartition('.')[2]}"), f"{path}: {key}"


def test_no_key_of_the_configuration_names_a_secret() -> None:
    keys = list_keys(TrainerConfig)
    assert {"prompt_key", "max_tokens"} <= keys
    assert [key for key in sorted(keys) if _names_secret(key)] == []


def list_keys(cls: type) -> set[str]:
    keys: set[str] = set()
    for entry in iterate_entries(cls, engine_class=FSDPConfig):
        keys.add(entry.name)
        variants = [] if entry.choice is None else list_classes(entry.choice).values()
        item = [] if entry.item is None else [entry.item.block]
        for block in (entry.block, *item, *variants):
            if block is not None:
                keys |= list_keys(block)
    return keys
