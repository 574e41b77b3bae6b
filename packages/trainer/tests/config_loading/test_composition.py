from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load

from .conftest import RL


def test_users_file_starts_from_the_built_in_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [temper, _self_]\nrun: {seed: 5}\ndata: {train: {paths: [a.jsonl]}}\n"
    )
    loaded = load(
        ["actor.engine.model.path=m", "run.total_steps=9"],
        config_dir=str(tmp_path),
        config_name="mine",
    )
    assert (loaded.config.run.seed, loaded.config.run.total_steps) == (5, 9)
    assert loaded.origins["run.seed"] == f"file {tmp_path / 'mine.yaml'}"


def test_users_file_may_choose_groups(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n"
        "- temper\n"
        "- override experiment: quickstart\n"
        "- override algorithm: rloo\n"
        "- _self_\n"
    )
    assert (
        load([], config_dir=str(tmp_path), config_name="mine").config.algorithm.advantage.name
        == "rloo"
    )


def test_users_experiment_can_be_chosen_like_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nrun:\n  seed: 11\n")
    loaded = load([*RL, "experiment=mine"], config_dir=str(tmp_path))
    assert (loaded.config.run.seed, loaded.origins["run.seed"]) == (
        11,
        f"file {tmp_path / 'experiment' / 'mine.yaml'}",
    )


def test_users_file_takes_precedence_over_a_built_in_one_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "quickstart.yaml").write_text(
        "# @package _global_\nrun:\n  seed: 12\n"
    )
    assert load([*RL, "experiment=quickstart"], config_dir=str(tmp_path)).config.run.seed == 12


def test_yaml_error_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("defaults: [temper, _self_]\nrun:\n  seed: [1\ntask: rl\n")
    with pytest.raises(
        ConfigError,
        match=rf"{tmp_path / 'bad.yaml'}, line 4, column 1?\d*: .*Correct the YAML there.",
    ):
        load(RL, config_dir=str(tmp_path), config_name="bad")


def test_repeated_key_in_a_file_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("defaults: [temper, _self_]\nrun:\n  seed: 1\n  seed: 2\n")
    with pytest.raises(
        ConfigError, match=rf"{tmp_path / 'twice.yaml'}, line 4, column 3: found duplicate key seed"
    ):
        load(RL, config_dir=str(tmp_path), config_name="twice")


def test_file_without_the_defaults_list_is_refused_with_the_missing_line(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("run:\n  seed: 1\n")
    with pytest.raises(
        ConfigError,
        match=r"model_engine is not set: start your file with defaults: \[temper, _self_\]",
    ):
        load(RL, config_dir=str(tmp_path), config_name="bare")


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer", "sft_trainer"])
def test_name_of_an_old_configuration_points_to_the_translator(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            rf"there is no file {name}.yaml.* of the older generation: `temper-migrate "
            rf"config --config-name NAME"
        ),
    ):
        load(RL, config_name=name)


def test_missing_file_and_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no file nowhere.yaml: check --config-name and --config-dir."
    ):
        load(RL, config_dir=str(tmp_path), config_name="nowhere")
    with pytest.raises(ConfigError, match=r"--config-dir .*/none is not a directory"):
        load(RL, config_dir=str(tmp_path / "none"))


def test_unknown_choice_lists_the_choices() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"there is no choice grop of the group algorithm: did you mean grpo\? If not, choose "
            r"one of cispo, clip_cov, dapo,"
        ),
    ):
        load([*RL, "algorithm=grop"])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.seed=1,2", "run.seed=1,2 gives several values for one run: write a list as [a,b]"),
        ("run.seed", "'run.seed' on the command line has no value: write run.seed=VALUE, or use"),
        (
            "quickstart",
            "'quickstart' on the command line has no value: write experiment=qui",
        ),
        ("experiment=", "there is no choice '' of the group experiment: choose one of gsm8k_grpo"),
        ("run.dir=(", "cannot parse 'run.dir=(' on the command line: write 'run.dir=\"(\"'."),
        ("run.dir=~/ä", "cannot parse 'run.dir=~/ä' on the command line: write 'run.dir=\"~/ä\"'."),
        (
            "run.trackers=[k=1,b]",
            (
                "cannot parse 'run.trackers=[k=1,b]' on the command line: "
                'write \'run.trackers=["k=1","b"]\'.'
            ),
        ),
        (
            "run.trackers=[a{b]",
            "cannot parse 'run.trackers=[a{b]' on the command line: write 'run.trackers=[\"a{b\"]'",
        ),
        ("run.dir=${a", "cannot parse 'run.dir=${a' on the command line: "),
        # In quotes, these would become text, which is not what was meant.
        (
            "run.dir={a=1}",
            "cannot parse 'run.dir={a=1}' on the command line: no viable alternative at input",
        ),
        (
            "run.trackers=[k=1,{a=1}]",
            "cannot parse 'run.trackers=[k=1,{a=1}]' on the command line: no viable alternative",
        ),
        (
            "run.dir=[[a=1],b]",
            "cannot parse 'run.dir=[[a=1],b]' on the command line: no viable alternative at input",
        ),
        (
            "~run.seed",
            (
                "~run.seed resets a key that a file or group has set, but no file or group sets "
                "run.seed: remove ~run.seed."
            ),
        ),
    ],
)
def test_override_that_cannot_be_used_is_explained(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*RL, override])
    assert str(caught.value).startswith(sentence)


def test_last_override_wins() -> None:
    assert load([*RL, "run.seed=1", "run.seed=2"]).config.run.seed == 2


def test_settings_of_hydras_own_application_are_unknown_keys(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [temper, _self_]\nhydra: {run: {dir: out}}\n")
    with pytest.raises(ConfigError, match=r"there is no key hydra.run.dir"):
        load(RL, config_dir=str(tmp_path), config_name="mine")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- temper\n", "mine.yaml is a list, but must be a mapping of keys."),
        (
            "defaults: temper\n",
            "Invalid defaults list in 'mine', defaults must be a list (got str).",
        ),
        (
            "defaults: [temper, {a: b, c: d}]\n",
            "In mine: Too many keys in default item {'a': 'b', 'c': 'd'}.",
        ),
    ],
)
def test_malformed_file_is_reported_in_one_line(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(RL, config_dir=str(tmp_path), config_name="mine")
    assert str(caught.value) == sentence
