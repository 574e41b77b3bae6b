"""YAML of other systems is named in one sentence, and never read as verl's."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from temper_legacy_shim.cli import app
from temper_legacy_shim.configs.reading.config_files import old_files, read_old_file, translate_file
from temper_legacy_shim.errors import UsageError

FILES = {
    "TRL": (
        "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: trl-lib/Capybara\nlearning_rate: "
        "2.0e-4\noutput_dir: out\n"
    ),
    "accelerate, such as TRL's examples have": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config: {fsdp_version: "
        "2}\nnum_processes: 8\n"
    ),
    "NeMo-RL": (
        "grpo: {num_prompts_per_step: 32}\nloss_fn: {ratio_clip_min: 0.2}\npolicy: {model_name: "
        "q}\ncluster: {num_nodes: 1}\n"
    ),
    "OpenRLHF": (
        "pretrain: q\nprompt_data: d\nrollout_batch_size: 1024\nmicro_train_batch_size: 8\n"
    ),
    "LLaMA-Factory": (
        "model_name_or_path: q\nstage: sft\nfinetuning_type: lora\ntemplate: llama3\n"
        "learning_rate: 1.0e-4\nnum_train_epochs: 3.0\noutput_dir: out\n"
    ),
    "SkyRL": (
        "data: {train_data: [d]}\ntrainer: {project_name: p, logger: wandb, placement: "
        "{colocate_all: true}}\ngenerator: {num_inference_engines: 1}\n"
    ),
    "AReaL": (
        "allocation_mode: sglang:d4\ncluster: {n_nodes: 1}\nactor: {path: q}\n"
        "gconfig: {n_samples: 4}\n"
    ),
    "EasyR1": (
        "data: {train_files: d}\nalgorithm: {adv_estimator: grpo}\nworker: {actor: "
        "{global_batch_size: 128}}\ntrainer: {nnodes: 1}\n"
    ),
}


@pytest.mark.parametrize("system", FILES)
def test_other_system_is_named_in_one_sentence(system: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILES[system])
    with pytest.raises(UsageError) as refused:
        translate_file(read_old_file(path))
    assert (
        str(refused.value)
        == f"{path} is a configuration of {system} and not of verl, so nothing of it is translated."
    )


def test_file_without_any_known_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("services: {web: {image: nginx}}\n")
    with pytest.raises(UsageError, match="has no key of any verl release"):
        translate_file(read_old_file(path))


FOREIGN = {
    "a value where verl has a block": "rlhf_type: grpo\nmodel: Qwen/Qwen2.5-7B\nuse_vllm: true\n",
    "one common key among others": (
        "trainer: {project_name: p, precision: bf16, devices: 8}\nnetwork: {layers: 2}\n"
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_file_with_hardly_a_key_of_verl_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FOREIGN[kind])
    with pytest.raises(UsageError, match="of any verl release"):
        translate_file(read_old_file(path))


def test_file_without_settings_is_refused_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{}\n")
    with pytest.raises(UsageError, match="is empty: give the configuration"):
        translate_file(read_old_file(path))


def test_file_of_a_fork_with_half_of_its_keys_from_verl_is_translated(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train_batch_size: 8, max_prompt_length: 9}\nenv: {name: x, seed: 1}\n")
    assert translate_file(read_old_file(path)).settings


def test_folder_skips_files_of_other_systems(tmp_path: Path) -> None:
    for number, text in enumerate(FILES.values()):
        (tmp_path / f"other_{number}.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text("actor_rollout_ref: {model: {path: /models/q}}\n")
    assert [old.path.name for old in old_files(tmp_path)] == ["run.yaml"]


def test_command_exits_with_the_code_of_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(FILES["NeMo-RL"])
    done = CliRunner().invoke(app, ["config", str(path)])
    assert done.exit_code != 0
