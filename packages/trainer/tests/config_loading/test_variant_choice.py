"""Test how files and overrides choose the variants of tagged unions."""

from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo, Gspo, Ppo, Sapo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.config.data import (
    ArithmeticSource,
    DataSource,
    JsonlSource,
    ParquetSource,
)
from temper_trainer.config_loading import load
from temper_trainer.config_loading.resolved_config import LoadedConfig, write_resolved
from temper_trainer.settings.variants import Custom, list_variants

LOSS = "algorithm.policy_loss"
CORRECTION = "algorithm.rollout_correction"
KIND = "data.train=jsonl"
BASE = ("experiment=quickstart", "batching.num_mini_batches=2")


def load_with(*overrides: str, **where: str) -> LoadedConfig:
    return load([*BASE, *overrides], **where)  # type: ignore[arg-type]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_with(*overrides)
    return str(caught.value)


def origins(loaded: LoadedConfig) -> dict[str, str]:
    prefix = f"{LOSS}."
    return {
        key.removeprefix(prefix): origin
        for key, origin in loaded.origins.items()
        if key.startswith(prefix)
    }


@pytest.mark.parametrize("name", list_variants(PolicyLoss))
def test_bare_name_is_the_variant_with_its_defaults(name: str) -> None:
    loss = load_with(f"{LOSS}={name}").config.algorithm.policy_loss
    assert loss == list_variants(PolicyLoss)[name]()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{LOSS}.clip_high=0.28"], Ppo(clip_high=0.28)),
        ([f"{LOSS}={{name: ppo, clip_high: 0.28}}"], Ppo(clip_high=0.28)),
        ([f"{LOSS}.name=gspo"], Gspo()),
        (["algorithm=gspo", f"{LOSS}.clip_low=0.1"], Gspo(clip_low=0.1)),
        ([f"{LOSS}.clip_high=5", "algorithm=cispo"], Cispo(clip_high=5.0)),
        # In either order: the name counts first.
        ([f"{LOSS}=gspo", f"{LOSS}.clip_high=0.1"], Gspo(clip_high=0.1)),
        ([f"{LOSS}.clip_high=0.1", f"{LOSS}=gspo"], Gspo(clip_high=0.1)),
        # The name in force keeps its settings, another one starts with its own defaults.
        (["algorithm=dapo", f"{LOSS}=ppo"], Ppo(clip_high=0.28)),
        (["algorithm=dapo", f"{LOSS}=cispo"], Cispo()),
        (["algorithm=dapo", f"{LOSS}=sapo"], Sapo()),
        (["algorithm=dapo", f"~{LOSS}"], Ppo()),
    ],
)
def test_overrides_choose_and_set(overrides: list[str], expected: PolicyLoss) -> None:
    assert load_with(*overrides).config.algorithm.policy_loss == expected


def test_settings_of_a_replaced_variant_have_no_origin() -> None:
    assert origins(load_with("algorithm=dapo", f"{LOSS}=cispo")) == {
        "name": "command line",
        "clip_low": "default",
        "clip_high": "default",
    }


def test_own_file_replaces_the_variant_of_a_group_and_is_replaced_by_an_override(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [temper, {override experiment: quickstart}, _self_]\n"
        "algorithm: {policy_loss: {name: clip_cov, fraction: 0.01}}\n"
        "batching: {num_mini_batches: 2}\n"
    )
    where = {"config_dir": str(tmp_path), "config_name": "mine"}
    loss = load(["algorithm=dapo"], **where).resolved["algorithm"]["policy_loss"]  # type: ignore[index, call-overload]
    assert (loss["name"], loss["fraction"], loss["clip_high"]) == ("clip_cov", 0.01, 0.2)
    replaced = load(["algorithm=dapo", f"{LOSS}=kl_cov"], **where).resolved["algorithm"][
        "policy_loss"
    ]  # type: ignore[index, call-overload]
    assert replaced == {"name": "kl_cov", "fraction": 2e-4, "kl_cov_coef": 1.0}


@pytest.mark.parametrize(
    "override",
    ["data.train={name: jsonl, paths: [own.jsonl]}", ["data.train.paths=[own.jsonl]", KIND]],
)
def test_files_replace_the_settings_of_generated_problems(override: str | list[str]) -> None:
    loaded = load_with(*([override] if isinstance(override, str) else override))
    assert loaded.config.data.train == JsonlSource(paths=("own.jsonl",))
    assert loaded.config.data.eval is not None
    assert loaded.config.data.eval.name == "arithmetic"
    assert loaded.origins["data.train.max_rows"] == "default"


def test_deleted_source_may_be_replaced() -> None:
    loaded = load_with("~data.train", KIND, "data.train.paths=[own.jsonl]")
    assert loaded.config.data.train == JsonlSource(paths=("own.jsonl",))


def test_deleted_setting_of_a_replaced_source_is_refused() -> None:
    assert "~data.train.seed resets a key" in refusal(
        "~data.train.seed", KIND, "data.train.paths=[own.jsonl]"
    )


def test_another_kind_of_files_starts_with_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [temper, {override experiment: quickstart}, _self_]\n"
        "data: {train: {name: jsonl, paths: [own.jsonl], max_rows: 7}}\n"
        "batching: {num_mini_batches: 2}\n"
    )
    where = {"config_dir": str(tmp_path), "config_name": "mine"}
    own = JsonlSource(paths=("own.jsonl",), max_rows=7)
    assert load([], **where).config.data.train == own  # type: ignore[arg-type]
    other = load(["data.train=parquet", "data.train.paths=[a]"], **where)  # type: ignore[arg-type]
    assert other.config.data.train == ParquetSource(paths=("a",))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.train_sets.more.paths=[a.jsonl]"], JsonlSource(paths=("a.jsonl",))),
        (
            ["data.train_sets.more=parquet", "data.train_sets.more.paths=[a]"],
            ParquetSource(paths=("a",)),
        ),
        (
            ["data.train_sets.more={name: arithmetic, max_rows: 3, seed: 4}"],
            ArithmeticSource(max_rows=3, seed=4),
        ),
    ],
)
def test_named_source_is_read_like_any_other(overrides: list[str], expected: DataSource) -> None:
    assert load_with(*overrides).config.data.train_sets == {"more": expected}


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["data.train.paths=[own.jsonl]"],
            "paths is a setting of jsonl, parquet, but data.train is arithmetic: remove it, or set",
        ),
        (
            ["data.train=datasets", "data.train.paths=[name]"],
            "but data.train is datasets, which has data.train.path: remove it, or set",
        ),
        (
            ["algorithm.reweight=max_min", "algorithm.reweight.exponent=3"],
            "exponent is a setting of power, but algorithm.reweight is max_min: remove it, or set",
        ),
        ([KIND, "data.train.paths=[a]", "data.train.seed=3"], "seed is a setting of arithmetic,"),
        ([KIND, "data.train.paths=[]"], "data.train: paths is empty"),
        (["data.train_sets.more.seed=1"], "but data.train_sets.more is jsonl: remove it, or"),
        (["data.train.loss_weight_key=w"], "but data.train is arithmetic: remove it, or"),
        (["data.train.split=dev"], "data.train.split is 'dev', but must be train or test."),
        (["data.train.route_key=x"], "route_key is 'x', but must be operations, or null."),
    ],
)
def test_settings_of_another_source_are_refused(overrides: list[str], complaint: str) -> None:
    assert complaint in refusal(*overrides)


def test_configuration_of_a_run_loads_again_and_accepts_another_variant(tmp_path: Path) -> None:
    first = load_with("algorithm=gspo", f"{LOSS}.clip_low=0.1")
    write_resolved(first, tmp_path)
    again = {"config_dir": str(tmp_path), "config_name": "config"}
    assert load([], **again).config == first.config  # type: ignore[arg-type]
    other = load([f"{LOSS}=cispo"], **again)  # type: ignore[arg-type]
    assert other.config.algorithm.policy_loss == Cispo()


def test_custom_loss_is_read_from_its_import_path_and_arguments() -> None:
    loaded = load_with(f"{LOSS}=my_losses:Mine", f"{LOSS}.arguments.width=0.3")
    custom = Custom(name="my_losses:Mine", arguments={"width": 0.3})
    assert loaded.config.algorithm.policy_loss == custom


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["algorithm=sapo", f"{LOSS}.clip_high=0.28"],
            f"but {LOSS} is sapo: remove it, or set {LOSS}=ppo or another of these. (set by: ",
        ),
        ([f"{LOSS}.arguments.x=1"], "arguments.x is a setting of package.module:Name, but"),
        ([f"{LOSS}=gpso"], f"{LOSS} is 'gpso', but must be one of ppo, gspo, "),
        ([f"{LOSS}=gpso"], "Did you mean 'gspo'?"),
        ([f"{LOSS}=null"], f"{LOSS} is null, but must be a name, or a block of keys"),
        (
            [f"{CORRECTION}.truncate_at=3"],
            (
                f"{CORRECTION} has no name: add one of token, sequence, mask, rollout_ratio, such "
                "as {name: token}."
            ),
        ),
        ([f"{CORRECTION}={{name: mask}}"], f"{CORRECTION} is mask and reject is empty"),
        ([f"{LOSS}.clip_hgih=1"], f"did you mean {LOSS}.clip_high?"),
        ([f"{LOSS}.clip_high=-1"], f"{LOSS}.clip_high is -1.0, but must be at least 0."),
        ([f"{LOSS}=clip_cov", f"{LOSS}.min_covariance=7"], f"{LOSS}: min_covariance is 7.0 and"),
        (["algorithm.clip_high=0.3"], f"did you mean {LOSS}.clip_high?"),
    ],
)
def test_wrong_choices_and_settings_are_refused(overrides: list[str], complaint: str) -> None:
    message = refusal(*overrides)
    assert complaint in message
    assert f"{CORRECTION}: {CORRECTION}" not in message
