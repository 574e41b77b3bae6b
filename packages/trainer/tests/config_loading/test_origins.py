from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from temper_trainer.config_loading import load, write_resolved
from temper_trainer.config_loading.composition import Layer
from temper_trainer.config_loading.loading import find_origins
from temper_trainer.config_loading.schema import flatten
from temper_trainer.metrics.run_files import read_settings

from .conftest import RL


def test_every_value_has_an_origin() -> None:
    loaded = load(["experiment=quickstart", "algorithm=ppo"])
    assert set(loaded.origins) == set(flatten(loaded.resolved))


def test_origin_is_default_group_or_command_line() -> None:
    origins = load(["experiment=quickstart", "algorithm=ppo", "run.seed=2"]).origins
    assert origins["run.seed"] == "command line"
    assert origins["run.total_steps"] == "group experiment=quickstart"
    assert origins["algorithm.advantage.gae_lambda"] == "group algorithm=ppo"
    assert origins["critic.engine.model.model_type"] == "group critic=value_model"
    assert origins["model_engine"] == "group model_engine=fsdp"
    assert origins["sampling.top_p"] == "default"


def test_last_layer_that_sets_a_key_or_its_block_is_its_origin() -> None:
    layers = [
        Layer(origin="group a=b", leaves=("x.y", "x.z")),
        Layer(origin="file f.yaml", leaves=("x",)),
        Layer(origin="command line", leaves=("x.z",)),
    ]
    assert find_origins({"x.y": 1, "x.z": 2, "w": 3}, layers=layers) == {
        "x.y": "file f.yaml",
        "x.z": "command line",
        "w": "default",
    }


def test_deleted_key_has_the_origin_default() -> None:
    layers = [
        Layer(origin="group a=b", leaves=("x.y",)),
        Layer(origin="command line", leaves=("x",), is_deletion=True),
    ]
    assert find_origins({"x.y": 1}, layers=layers) == {"x.y": "default"}


def test_written_config_repeats_the_run(tmp_path: Path) -> None:
    loaded = load(
        [
            "experiment=quickstart",
            "algorithm=ppo",
            "run.seed=2",
            "data.prompt_template='Q: {prompt}\\nA:'",
        ]
    )
    write_resolved(loaded, tmp_path)
    again = load([], config_dir=str(tmp_path), config_name="config")
    assert (again.config, again.digest) == (loaded.config, loaded.digest)


def test_written_config_repeats_a_run_whose_experiment_has_unused_settings(
    tmp_path: Path,
) -> None:
    # The experiment brings run.eval_sampling, which has no effect without data.eval: the user never
    # wrote it.
    loaded = load(
        [
            "experiment=gsm8k_grpo",
            "data.train.paths=[train.jsonl]",
            "actor.engine.model.path=m",
            "data.tokenizer.path=m",
        ]
    )
    write_resolved(loaded, tmp_path)
    assert load([], config_dir=str(tmp_path), config_name="config").config == loaded.config


def test_written_files_contain_the_origins_of_values(tmp_path: Path) -> None:
    write_resolved(load([*RL, "run.seed=2"]), tmp_path)
    assert "  seed: 2  # command line\n" in (tmp_path / "config.yaml").read_text()
    origins = yaml.safe_load((tmp_path / "config_origins.yaml").read_text())
    assert (origins["run.seed"], origins["run.total_steps"]) == ("command line", "default")


def test_multi_line_template_is_written_unchanged(tmp_path: Path) -> None:
    loaded = load([*RL, 'data.prompt_template="first\n\n  {prompt}: x # y\n"'])
    write_resolved(loaded, tmp_path)
    assert (
        yaml.safe_load((tmp_path / "config.yaml").read_text())["data"]["prompt_template"]
        == "first\n\n  {prompt}: x # y\n"
    )


@pytest.mark.parametrize("text", ["a\x85b", "a\u2028b", "a\u00a0é😀", "'\"#: ", "1e3", "yes", ""])
def test_text_is_read_again_as_it_was(text: str, tmp_path: Path) -> None:
    loaded = load(RL)
    texts = [f"{text} {'x' * 200} {text}", text]
    assert isinstance(loaded.resolved["sampling"], dict)
    sampling = loaded.resolved["sampling"] | {"stop": texts}
    write_resolved(replace(loaded, resolved=loaded.resolved | {"sampling": sampling}), tmp_path)
    assert OmegaConf.load(tmp_path / "config.yaml")["sampling"]["stop"] == texts


def test_digest_does_not_depend_on_folder_length_or_logging() -> None:
    plain = load(RL).digest
    free = [
        "run.dir=elsewhere",
        "run.total_steps=7",
        "run.progress=false",
        "run.resume=auto",
        "run.trackers=[]",
        "runtime.kind=ray",
        "actor.num_workers=2",
    ]
    assert load([*RL, *free]).digest == plain


def test_digest_depends_on_what_is_trained() -> None:
    changes = [
        "run.seed=1",
        "actor.engine.optimizer.lr=1e-3",
        "algorithm.entropy_coef=0.1",
        "data.train.paths=[other.jsonl]",
    ]
    assert len({load([*RL, change]).digest for change in changes} | {load(RL).digest}) == 5


def test_settings_of_an_earlier_start_are_kept(tmp_path: Path) -> None:
    for seed in (1, 1, 2, 3):
        write_resolved(load([*RL, f"run.seed={seed}"]), tmp_path)
    written = ["config.superseded-1.yaml", "config.superseded-2.yaml", "config.yaml"]
    assert [yaml.safe_load((tmp_path / name).read_text())["run"]["seed"] for name in written] == [
        1,
        2,
        3,
    ]
    assert not (tmp_path / "config.superseded-3.yaml").exists()


@pytest.mark.parametrize("content", [b"", b"run: {seed: 1", b"\xff\xfe\xfa", b"- a list\n"])
def test_truncated_config_file_does_not_stop_the_next_start(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    assert read_settings(tmp_path) == {}
    assert caplog.text.count("config.yaml cannot be read as settings") == 1
    write_resolved(load(RL), tmp_path)
    assert read_settings(tmp_path)["run.seed"] == 0
    assert (tmp_path / "config.superseded-1.yaml").read_bytes() == content


def test_config_that_cannot_be_written_leaves_the_earlier_one_and_is_named(
    tmp_path: Path,
) -> None:
    write_resolved(load(RL), tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    (tmp_path / "config.yaml.new.draft").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/config\.yaml'"):
        write_resolved(load([*RL, "run.seed=1"]), tmp_path)
    assert (tmp_path / "config.yaml").read_bytes() == before
