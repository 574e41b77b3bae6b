"""A user's own files as Hydra composes them, held against Hydra itself.

And what can't be followed is said.
"""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("hydra", reason="needs Hydra, which temper-trainer brings, to compare with")

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from temper_legacy_shim.configs import Outcome
from temper_legacy_shim.configs.reading.config_files import old_files, read_old_file, translate_file
from temper_legacy_shim.configs.reading.config_values import Plain

from .conftest import values

BASE = """\
actor_rollout_ref: {rollout: {n: 1, name: vllm}, actor: {optim: {lr: 1e-6}, clip: 1}}
data: {files: a, seed: null}
trainer: {nnodes: 1}
"""
"""Stands for the old package's own file, which Hydra needs to compose at all."""
OTHERS = {
    "shared.yaml": "actor_rollout_ref: {rollout: {n: 4}}\ntrainer: {nnodes: 4}\n",
    "data/mine.yaml": "files: mine\n",
    "data/long.yaml": "defaults: [mine, _self_]\nmax_prompt_length: 4096\n",
    "actor/wide.yaml": "defaults: [/optim@optim: fast, _self_]\nclip: 3\n",
    "optim/fast.yaml": "lr: 1e-5\nbetas: [0.9, 0.95]\n",
    "global/all.yaml": "# @package _global_\ntrainer: {nnodes: 9}\n",
    "nested/deep/one.yaml": "# a comment\n# @package data\nseed: 7\n",
    "experiment/one.yaml": (
        "# @package _global_\ndefaults:\n  - override /data: long\nactor_rollout_ref: {rollout: "
        "{n: 6}}\n"
    ),
}
LISTS = [
    "[ppo_trainer, _self_]",
    "[ppo_trainer, shared, _self_]",
    "[ppo_trainer, _self_, shared]",
    "[ppo_trainer, shared]",
    "[ppo_trainer, {data: mine}, _self_]",
    "[ppo_trainer, _self_, {data: mine}]",
    "[ppo_trainer, {data: [mine, long]}, _self_]",
    "[ppo_trainer, {data: null}, _self_]",
    "[ppo_trainer, {data: long}, _self_]",
    "[ppo_trainer, _self_, {actor@actor_rollout_ref.actor: wide}]",
    "[ppo_trainer, {/actor@actor_rollout_ref.actor: wide}, _self_]",
    "[ppo_trainer, _self_, global/all]",
    "[ppo_trainer, _self_, {global: all}]",
    "[ppo_trainer, nested/deep/one, _self_]",
    "[ppo_trainer, _self_, shared@extra.block]",
    "[ppo_trainer, _self_, shared@_global_]",
    "[ppo_trainer, {data: mine}, _self_, {override data: long}]",
    "[ppo_trainer, _self_, {optional data: not_there}]",
]
OWN = "actor_rollout_ref: {rollout: {n: 2}}\ndata: {files: own}\n"


@pytest.mark.filterwarnings("ignore:.*missing `_self_`")
@pytest.mark.parametrize("listed", LISTS)
def test_a_defaults_list_is_followed_as_hydra_follows_it(listed: str, tmp_path: Path) -> None:
    for name, text in OTHERS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "ppo_trainer.yaml").write_text(BASE)
    (tmp_path / "mine.yaml").write_text(f"defaults: {listed}\n{OWN}")
    with initialize_config_dir(str(tmp_path), version_base=None):
        expected = OmegaConf.to_container(compose("mine"))
    result = read_old_file(tmp_path / "mine.yaml")
    assert result.missing == ()
    assert result.values == expected
    assert result.entry == "ppo_trainer"


def test_a_folder_of_the_search_path_is_looked_for_around_the_file(tmp_path: Path) -> None:
    (tmp_path / "shared_configs").mkdir()
    (tmp_path / "shared_configs/base.yaml").write_text("actor_rollout_ref: {rollout: {n: 32}}\n")
    path = tmp_path / "examples/run/mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "hydra: {searchpath: [pkg://verl.trainer.config, file://shared_configs]}\ndefaults: "
        "[ppo_trainer, base, _self_]\n"
    )
    assert read_old_file(path).values == {"actor_rollout_ref": {"rollout": {"n": 32}}}


def test_what_a_list_names_and_no_one_finds_is_for_a_person(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [ppo_trainer, somewhere_else, _self_]\n{OWN}")
    result = translate_file(read_old_file(path), version="v0.7.0")
    assert result.outcome is Outcome.PERSON
    assert "names somewhere_else, which is neither next to it" in result.findings[0].message


def test_values_that_the_old_defaults_won_over_are_for_a_person(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [_self_, ppo_trainer]\n{OWN}")
    (given,) = read_old_file(path).missing
    assert "ppo_trainer after _self_" in given


def test_groups_of_the_old_package_are_its_releases_trees(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    listed = "[{actor@actor_rollout_ref.actor: megatron_actor}, {data@data: legacy_data}, _self_]"
    path.write_text(f"defaults: {listed}\n{OWN}")
    result = read_old_file(path)
    assert (result.missing, result.groups) == ((), {"model_engine": "megatron"})
    assert (
        translate_file(result, entry="verl.trainer.main_ppo", version="v0.7.0").source.family
        == "ppo_megatron"
    )


def test_a_copy_of_the_old_tree_with_a_changed_group_file_keeps_the_change(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/dp_actor.yaml").write_text(yaml.safe_dump({"optim": {"lr": 7e-6}}))
    (tmp_path / "ppo_trainer.yaml").write_text(
        "defaults: [{actor@actor_rollout_ref.actor: dp_actor}, _self_]\nalgorithm: {adv_estimator: "
        "grpo}\n"
    )
    (old,) = old_files(tmp_path)
    new: dict[str, Plain] = values(translate_file(old, version="v0.7.0"))
    assert new["actor.engine.optimizer.lr"] == 7e-6
