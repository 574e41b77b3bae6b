"""Overrides, trees and files as the old systems read them."""

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="needs Hydra, which temper-trainer brings, to compare with")

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from yaml import YAMLError

from temper_legacy_shim.configs import Outcome, translate
from temper_legacy_shim.configs.mapping.rules import rules
from temper_legacy_shim.configs.reading.composition import old_config
from temper_legacy_shim.configs.reading.config_files import read_old_file
from temper_legacy_shim.configs.reading.config_values import Plain, read_overrides
from temper_legacy_shim.configs.reading.trees import (
    default_tree,
    families_of,
    known_version,
    versions,
)
from temper_legacy_shim.configs.report import summary_lines, yaml_of
from temper_legacy_shim.errors import DamagedFileError, UsageError

from .conftest import BASE, rules_found, translated, values
from .examples import BASES, example_of

MISSING = ("tool_config", "inference.name")
"""Interpolations of a value that must be given (???), or of a block as one value.

No rule reads them.
"""
FILES = {
    "ppo_fsdp": "main_ppo_fsdp",
    "ppo_megatron": "main_ppo_megatron",
    "sft_columns": "sft_fsdp",
    "sft_fsdp": "sft_engine_fsdp",
    "sft_megatron": "sft_engine_megatron",
    "generation": "generation",
    "evaluation": "evaluation",
}


RECORDED = [version for version in versions() if version not in ("main", "v0.9.1")]
"""Releases whose trees were also composed elsewhere; test_own_trees.py composes the others."""


@pytest.mark.parametrize("version", RECORDED)
def test_every_default_resolves_to_what_hydra_made_of_it(version: str, facts: Path) -> None:
    for family in families_of(version):
        composed = json.loads((facts / "defaults" / version / f"{FILES[family]}.json").read_text())
        old = old_config(
            version=version, family=family, entry="", defaults=default_tree(version, family)
        )
        assert old.tree == composed["flat"]
        differing = {
            key: (old.get(key), value)
            for key, value in composed["resolved"].items()
            if old.get(key) != value
        }
        assert {key: pair for key, pair in differing.items() if not key.endswith(MISSING)} == {}


def hydras(token: str) -> Plain:
    """Return the value by Hydra's own parser."""
    result: Plain = OverridesParser.create().parse_override(token).value()
    return result


def test_values_are_read_as_hydra_reads_them(invocations: list[dict[str, object]]) -> None:
    tokens = sorted({str(token) for row in invocations for token in row["overrides"]})  # type: ignore[attr-defined]
    for token in random.Random(7).sample(tokens, 150):
        (override,) = read_overrides([token])
        try:
            expected = hydras(token)
        except HydraException:
            assert override.kind != "set" or override.complaint is not None, token
            continue
        assert override.complaint is None, token
        assert override.value == expected, token


@pytest.mark.parametrize(
    "token",
    [
        "a=1e-6", "a=1.", "a=.5", "a=1_000", "a=01", "a=null", "a=True", "a=nan_", "a=[a,b]",
        "a=['x, y',\"z\"]", "a=[[6],[8]]",
        "a={b:1,c:[2]}",
        "a=", "a='it''s'", "a=${b.c}", "a=x y", "a=a:b", "a=-1", "a=+3", "a=1e5", "a=inf",
        "a=a=b", "a=/p/q-r.s",
    ],
)  # fmt: skip
def test_corners_of_the_grammar(token: str) -> None:
    (override,) = read_overrides([token])
    try:
        assert override.value == hydras(token)
    except HydraException:
        assert override.complaint is not None


def test_a_plus_on_a_key_that_the_release_has_is_reported_and_still_read() -> None:
    result = translated("v0.5.0", "+trainer.val_before_train=False")
    assert any(
        finding.level == "refused" and "drop the +" in finding.message
        for finding in result.findings
    )


def test_a_key_that_the_release_lacks_is_reported_and_still_read() -> None:
    result = translated("v0.8.0", "critic.model.fsdp_config.param_offload=True")
    assert any(
        finding.level == "refused"
        and "v0.8.0 has no key critic.model.fsdp_config" in finding.message
        for finding in result.findings
    )


def test_a_later_token_wins() -> None:
    result = translated("v0.5.0", "data.train_batch_size=128")
    assert [
        token.disposition for token in result.tokens if token.key == "data.train_batch_size"
    ] == ["superseded", "moved"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.7", "v0.7.1"),
        ("v0.7.0", "v0.7.0"),
        ("v0.4", "v0.4.1"),
        ("0.3.0.post1", "v0.3.0.post1"),
        ("v0.9.1", "v0.9.1"),
        ("0.9", "v0.9.1"),
        ("main", "main"),
    ],
)
def test_versions_in_all_their_spellings(text: str, expected: str) -> None:
    assert known_version(text) == expected


@pytest.mark.parametrize("text", ["seven", "v0.1", "v1.0", "v0.9.2", "0.10", ""])
def test_what_is_no_known_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        known_version(text)


def test_a_block_given_as_a_full_goes_by_the_rules_of_its_keys() -> None:
    result = translated(
        "v0.7.0",
        "actor_rollout_ref.actor.optim={lr:2e-6,weight_decay:0.1}",
        "~critic.optim",
        "critic=null",
    )
    block, deleted, taken = result.tokens[-3:]
    assert (block.disposition, block.new_keys) == (
        "mapped",
        ("actor.engine.optimizer.lr", "actor.engine.optimizer.weight_decay"),
    )
    assert deleted.disposition == taken.disposition == "dropped"
    assert result.unmapped == {}


def test_one_value_in_the_position_of_a_block_is_a_forks_own() -> None:
    foreign = "actor_rollout_ref.actor.policy_loss=plusplus"
    for version in ("v0.3.0.post1", "v0.7.1"):
        result = translated(version, foreign, "actor_rollout_ref.model.path=/models/q")
        assert result.tokens[-2].disposition == "unmapped"
        assert any(
            "policy_loss=plusplus" in finding.message
            for finding in result.findings
            if finding.rule == "unmapped"
        )
        assert values(result)["actor.engine.model.path"] == "/models/q"
    assert values(translated("v0.7.1", "trainer=mine", "actor_rollout_ref.rollout=mine")) == values(
        translated("v0.7.1")
    )
    inferred = translate(
        ["algorithm.kl_ctrl.kl_coef=0.1", "critic.model.fsdp_config.param_offload=True", foreign]
    )
    assert any(
        "refuses actor_rollout_ref.actor.policy_loss" in given for given in inferred.source.evidence
    )


def test_a_forks_key_in_a_block_that_we_know_is_still_unmapped() -> None:
    result = translated(
        "v0.7.0",
        "reward_model.my_fork.thing=2",
        "+actor_rollout_ref.actor.my_loss_weight=0.1",
        "++trainer.mine={a:1}",
    )
    assert [token.disposition for token in result.tokens[-3:]] == ["unmapped"] * 3
    assert result.unmapped == {
        "reward_model.my_fork.thing": 2,
        "actor_rollout_ref.actor.my_loss_weight": 0.1,
        "trainer.mine.a": 1,
    }


def test_a_variants_own_keys_are_no_strangers_wherever_its_file_lies() -> None:
    for entry in ("recipe.dapo.main_dapo", "my_project/dapo/src/main_dapo.py"):
        result = translated(
            "v0.5.0",
            "reward_model.overlong_buffer.enable=True",
            "reward_model.overlong_buffer.len=128",
            "reward_model.overlong_buffer.penalty_factor=1.0",
            entry=entry,
        )
        assert not any(finding.level == "refused" for finding in result.findings)
        assert {setting.key for setting in result.settings} >= {
            "reward.shaping.overlong.buffer_tokens"
        }
    both = translated(
        "v0.7.0",
        "async_training.staleness_threshold=0.5",
        entry="fully_async_main",
        config_name="fully_async_dapo_trainer",
    )
    assert not any(finding.level == "refused" for finding in both.findings)


@pytest.mark.parametrize("given", ["$LR", "${LR}"])
def test_a_number_that_only_the_shell_knows_goes_on_and_a_file_reads_it_from_the_environment(
    given: str,
) -> None:
    result = translated(
        "v0.7.0", f"actor_rollout_ref.actor.optim.lr={given}", "trainer.project_name=$PROJECT"
    )
    assert result.outcome is Outcome.PINNED
    assert values(result)["actor.engine.optimizer.lr"] == given  # a script keeps it as it stands
    assert 'lr: "${oc.decode:${oc.env:LR}}"' in yaml_of(result)


def test_a_number_that_sizes_are_computed_from_is_requested() -> None:
    result = translated("v0.7.0", "data.train_batch_size=$BATCH")
    assert "value-unknown" in rules_found(result, "person")


def test_a_number_from_the_environment_is_its_default() -> None:
    base: dict[str, Plain] = {"data": {"max_prompt_length": "${oc.env:PROMPT,768}"}}
    result = translate(BASE, entry="verl.trainer.main_ppo", version="v0.7.0", base=base)
    assert values(result)["data.max_prompt_tokens"] == 768
    assert "value-unknown" in rules_found(result, "note")
    assert result.outcome is Outcome.PINNED


def nested(flat: dict[str, Plain]) -> dict[str, Plain]:
    """Return the blocks from dotted keys."""
    tree: dict[str, Plain] = {}
    for key, value in flat.items():
        *blocks, name = key.split(".")
        position = tree
        for block in blocks:
            inner = position.setdefault(block, {})
            assert isinstance(inner, dict)
            position = inner
        position[name] = value
    return tree


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize("form", ["flat", "resolved"])
def test_a_dump_of_a_release_means_what_the_release_meant(
    version: str, form: str, facts: Path
) -> None:
    for family in families_of(version):
        dump = json.loads((facts / "defaults" / version / f"{FILES[family]}.json").read_text())[
            form
        ]
        entry = {
            "generation": "verl.trainer.main_generation",
            "evaluation": "verl.trainer.main_eval",
        }.get(family, "")
        entry = entry or (
            "verl.trainer.main_ppo" if "ppo" in family else "verl.trainer.fsdp_sft_trainer"
        )
        entry = "verl.trainer.sft_trainer" if family in ("sft_fsdp", "sft_megatron") else entry
        groups = ["engine=megatron"] if family == "sft_megatron" else []
        name = "ppo_megatron_trainer" if family == "ppo_megatron" else None
        plain = translate(groups, entry=entry, config_name=name, version=version)
        dumped = translate(
            groups, entry=entry, config_name=name, version=version, base=nested(dump)
        )
        assert values(dumped) == values(plain), family
        assert {finding.rule for finding in dumped.findings} == {
            finding.rule for finding in plain.findings
        }, family


def test_a_dump_keeps_what_its_run_had_changed(facts: Path) -> None:
    dump = json.loads((facts / "defaults/v0.5.0/main_ppo_fsdp.json").read_text())["resolved"]
    lengths = dict.fromkeys(
        ("data.max_response_length", "actor_rollout_ref.rollout.response_length"), 2048
    )
    changed = dump | lengths | {"actor_rollout_ref.rollout.n": 8, "data.image_key": "pictures"}
    result = translate(entry="verl.trainer.main_ppo", version="v0.5.0", base=nested(changed))
    assert "images" in rules_found(result, "person")
    text = translate(
        entry="verl.trainer.main_ppo",
        version="v0.5.0",
        base=nested(changed | {"data.image_key": "images"}),
    )
    assert "images" not in rules_found(text, "person")
    assert (values(text)["algorithm.group_size"], values(text)["sampling.max_tokens"]) == (8, 2048)


def test_values_of_a_file_are_accounted_for_like_overrides() -> None:
    """Every example of the table of rules, given as a file and as overrides."""
    num_compared = 0
    for rule in rules():
        example = example_of(rule)
        tokens = read_overrides(example.tokens)
        keys = {token.key for token in tokens}
        if any(token.kind != "set" or token.prefix for token in tokens) or len(keys) < len(tokens):
            continue
        if any(key.startswith(f"{other}.") for key in keys for other in keys):
            continue
        given = [t for t in BASES.get(example.entry, BASE) if t.partition("=")[0] not in keys]
        version = None if example.release == "-" else example.release
        base = nested({token.key: token.value for token in tokens})
        as_file = translate(given, entry=example.entry, version=version, base=base)
        as_tokens = translate([*given, *example.tokens], entry=example.entry, version=version)
        disposition = {token.key: token.disposition for token in as_tokens.tokens}
        for token in as_file.tokens:
            if token.index < 0:  # a value of the release's own is none of the user's
                assert disposition[token.key] == token.disposition, (rule.id, token)
                num_compared += 1
    assert num_compared > 200


def test_value_of_a_file_that_is_dropped_has_the_hazard_of_an_override() -> None:
    base: dict[str, Plain] = {"actor_rollout_ref": {"rollout": {"quantization": "fp8"}}}
    result = translate(BASE, entry="verl.trainer.main_ppo", version="v0.7.0", base=base)
    token = next(token for token in result.tokens if token.index < 0)
    assert (token.text, token.disposition) == (
        "actor_rollout_ref.rollout.quantization=fp8",
        "dropped",
    )
    assert any(
        "quantization=fp8 has no counterpart" in finding.message
        for finding in result.findings
        if finding.level == "hazard"
    )


def test_values_of_a_file_that_are_the_defaults_are_not_listed() -> None:
    base: dict[str, Plain] = {"actor_rollout_ref": {"actor": {"clip_ratio": 0.2, "ppo_epochs": 2}}}
    result = translate(BASE, entry="verl.trainer.main_ppo", version="v0.7.0", base=base)
    keys = [token.key for token in result.tokens if token.index < 0]
    assert keys == ["actor_rollout_ref.actor.ppo_epochs"]
    num_settings = len(BASE) + 1
    first = summary_lines([result], next_step="")[0]
    assert first == f"translated: {num_settings} of {num_settings} settings"


def test_key_that_is_twice_in_a_file_is_refused_as_by_omegaconf(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("data: {train_batch_size: 64}\ntrainer: {nnodes: 1}\ndata: {seed: 1}\n")
    with pytest.raises(YAMLError, match="found duplicate key data"):
        OmegaConf.load(path)
    with pytest.raises(DamagedFileError, match=r"the key data is there twice.* line 3"):
        read_old_file(path)


def test_keys_of_a_merged_mapping_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(
        "x: &x {total_epochs: 3, nnodes: 1}\ntrainer: {<<: *x, nnodes: 2}\n"
        "critic: {cliprange_value: 0.5}\n"
    )
    assert read_old_file(path).values["trainer"] == {"total_epochs": 3, "nnodes": 2}
    assert OmegaConf.load(path).trainer == {"total_epochs": 3, "nnodes": 2}


def test_file_with_a_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {nnodes: 1}\na: &a [*a]\n")
    with pytest.raises(DamagedFileError, match="a value that contains itself"):
        read_old_file(file)
