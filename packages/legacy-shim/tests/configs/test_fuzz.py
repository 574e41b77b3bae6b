"""Anything goes in; only our own error comes out, quickly, and the same text twice.

The nightly tests come in parts, each with a seed of its own, so that a shared machine can run them
one by one.
"""

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from temper_legacy_shim.configs import translate
from temper_legacy_shim.configs.reading.config_files import read_old_file
from temper_legacy_shim.configs.reading.trees import all_keys, versions
from temper_legacy_shim.configs.report import plain_report, yaml_of
from temper_legacy_shim.errors import ShimError

KEYS = st.sampled_from(
    sorted(
        {
            *all_keys("ppo_fsdp"),
            *all_keys("ppo_megatron"),
            *all_keys("sft_columns"),
            *all_keys("sft_fsdp"),
        }
    )
)
WORDS = st.sampled_from(
    [
        *(
            "1",
            "-1",
            "0",
            "2.5",
            "1e-6",
            "null",
            "true",
            "False",
            "grpo",
            "gae",
            "fsdp2",
            "megatron",
            "[a,b]",
            "[]",
            "{}",
            "{a:1}",
            "${x}",
        ),
        *(
            "$Y",
            "${data.train_batch_size}",
            "'q'",
            '"',
            "[",
            "a,b",
            "nan",
            "inf",
            "${actor_rollout_ref.actor.strategy}",
            "${.n}",
            "1e400",
        ),
        "1000000000000000000000",
    ]
)
VALUES = st.one_of(WORDS, st.text(max_size=12), st.integers().map(str), st.floats().map(str))
TOKENS = st.one_of(
    st.builds(
        lambda prefix, key, value: f"{prefix}{key}={value}",
        st.sampled_from(["", "", "+", "++", "~"]),
        KEYS,
        VALUES,
    ),
    st.text(max_size=30),
    st.sampled_from(
        [
            "--config-name=ppo_megatron_trainer",
            "--config-name",
            "model_engine=megatron",
            '"$@"',
            "engine=fsdp",
            "~data",
            "a.b=1",
        ]
    ),
)
OVERRIDES = st.lists(TOKENS, max_size=12)
ENTRIES = st.sampled_from(
    [
        "",
        "x",
        "verl.trainer.main_ppo",
        "verl.trainer.fsdp_sft_trainer",
        "verl.trainer.sft_trainer",
        "verl.trainer.main_generation",
        "verl.trainer.main_eval",
        "recipe.dapo.main_dapo",
        "verl.experimental.fully_async_policy.fully_async_main",
    ]
)
RELEASES = st.one_of(st.none(), st.sampled_from(versions()))
SECONDS = 20.0


def check(tokens: list[str], entry: str, version: str | None) -> None:
    """Check one input: our error, or a result that reads back and is the same twice."""
    begin = time.monotonic()
    try:
        first = translate(tokens, entry=entry, version=version)
    except ShimError:
        return
    assert [token.text for token in first.tokens] == tokens
    text = yaml_of(first)
    assert text == yaml_of(translate(tokens, entry=entry, version=version))
    yaml.safe_load(text)
    plain_report(first)
    assert time.monotonic() - begin < SECONDS


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(OVERRIDES, ENTRIES, RELEASES)
def test_any_override_list_is_translated_or_refused(
    tokens: list[str], entry: str, version: str | None
) -> None:
    check(tokens, entry, version)


# Nightly: takes minutes. The test above draws fewer lists every day.
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
def test_twenty_thousand_override_lists(part: int) -> None:
    @seed(part)
    @settings(max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
    @given(OVERRIDES, ENTRIES, RELEASES)
    def one(tokens: list[str], entry: str, version: str | None) -> None:
        check(tokens, entry, version)

    one()


TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "data",
                    "actor_rollout_ref",
                    "actor",
                    "rollout",
                    "trainer",
                    "n",
                    "defaults",
                    "optim",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


FILES = st.one_of(TREES.map(yaml.safe_dump), st.text(max_size=80))


def check_file(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    try:
        translate([], base=read_old_file(path).values)
    except ShimError:
        return


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(FILES)
def test_any_yaml_is_read_or_refused(tmp_path: Path, text: str) -> None:
    check_file(tmp_path / "fuzz.yaml", text)


# Nightly: takes minutes. The test above draws fewer files every day.
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(5))
def test_ten_thousand_yaml_files(tmp_path: Path, part: int) -> None:
    @seed(part)
    @settings(max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
    @given(FILES)
    def one(text: str) -> None:
        check_file(tmp_path / "fuzz.yaml", text)

    one()
