import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from temper_engine_api.checkpoint import PartReport, report_part
from temper_engine_api.errors import (
    CheckpointError,
    ConfigError,
    IncompleteCheckpointError,
    format_install,
)
from temper_engine_api.specs import LoraSpec
from temper_trainer.checkpoint.checkpointer import Checkpointer, check_resume_step
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config_loading import load
from temper_trainer.config_loading.checks import vllm_environment
from temper_trainer.config_loading.checks.external_checks import (
    check_external_objects,
    check_libraries,
    check_models,
)
from temper_trainer.environment.sandbox import open_sandbox
from temper_trainer.rollout.vllm.served_adapters import ServedAdapter
from temper_trainer.rollout.vllm.server_addresses import TOKEN_VARIABLE
from temper_trainer.run_lock import RunLock
from temper_trainer.types import DataCursor

WEIGHTS = b'6\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + bytes(8)


def make_model(folder: Path) -> None:
    """Write as much of a model directory as a check reads."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)


@pytest.fixture
def there(tmp_path: Path) -> list[str]:
    """Overrides that name a data file and a model directory which exist."""
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    make_model(tmp_path / "model")
    return [
        f"data.train.paths=[{tmp_path}/train.jsonl]",
        f"actor.engine.model.path={tmp_path}/model",
    ]


def refusal(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_external_objects(load(overrides).config)
    return str(caught.value)


def test_existing_files_and_models_are_accepted(there: list[str]) -> None:
    check_external_objects(load(there).config)


def test_missing_data_file_is_named(there: list[str]) -> None:
    assert refusal([*there, "data.eval.paths=[gone.jsonl]"]).startswith(
        "data.eval.paths names gone.jsonl, which is not a file (relative to "
    )


@pytest.mark.parametrize(
    ("path", "remedy"),
    [("", "it is a folder, list its files"), ("/*.jsonl", "patterns are not expanded")],
)
def test_folder_and_pattern_in_place_of_a_file_are_named_as_such(
    there: list[str], tmp_path: Path, path: str, remedy: str
) -> None:
    assert remedy in refusal([*there, f"data.eval.paths=['{tmp_path}{path}']"])


def test_file_of_a_reward_in_place_of_its_module_is_refused_with_the_module(
    there: list[str],
) -> None:
    for path in ("my_reward.py:score", "rewards/my_reward.py:score"):
        assert "write the module and not its file, my_reward:score" in refusal(
            [*there, f"reward.function='{path}'"]
        )


def test_missing_file_of_tools_is_named(there: list[str], tmp_path: Path) -> None:
    assert refusal([*there, "data.tools_path=tools.yaml"]).startswith(
        "data.tools_path is tools.yaml, which is not a file (relative to "
    )
    (tmp_path / "tools.yaml").write_text("[]\n")
    check_external_objects(load([*there, f"data.tools_path={tmp_path}/tools.yaml"]).config)


def test_urls_are_not_checked_before_the_run(there: list[str]) -> None:
    check_external_objects(load([*there, "data.eval.paths=['s3://bucket/test.jsonl']"]).config)


def test_file_of_a_model_is_no_model(there: list[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert refusal([*there, f"actor.engine.model.path={file}"]).startswith(
        f"actor.engine.model.path is {file}, which is a file: write {tmp_path}, its folder."
    )


def test_other_file_in_place_of_a_model_is_no_model(
    there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal([*there, "actor.engine.model.path=train.jsonl"]) == (
        "actor.engine.model.path is train.jsonl, which is a file: give the folder of a Hugging "
        "Face model."
    )


def test_directory_without_a_model_is_named(there: list[str], tmp_path: Path) -> None:
    text = refusal([*there, f"actor.engine.model.path={tmp_path}"])
    assert text.startswith(
        f"actor.engine.model.path is {tmp_path}, but there is no Hugging Face model in that folder "
        "(no config.json)"
    )
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface/config.json").write_text("{}")
    text = refusal([*there, f"actor.engine.model.path={tmp_path}"])
    assert text.endswith(f"write {tmp_path}/huggingface, the model of that run.")


def test_model_of_a_run_that_was_not_made_yet_is_made_first(there: list[str]) -> None:
    text = refusal([*there, "actor.engine.model.path=runs/sft/huggingface"])
    assert text.endswith("finish the run with run.dir=runs/sft first, or give another model.")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (
            {
                "architectures": ["Glm4vForConditionalGeneration"],
                "model_type": "glm4v",
                "vision_config": {"depth": 32},
            },
            "vision_config",
        ),
        ({"model_type": "internvl"}, "model_type internvl"),
        ({"model_type": ["internvl"]}, "model_type ['internvl']"),
        ({"architectures": ["LlavaForCausalLM"]}, "LlavaForCausalLM"),
        (
            {"architectures": ["XForConditionalGeneration"], "text_config": {"hidden_size": 8}},
            "XForConditionalGeneration",
        ),
    ],
)
def test_vision_model_is_refused_before_the_run(
    there: list[str], tmp_path: Path, fields: dict[str, object], part: str
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    assert refusal(there) == (
        f"actor.engine.model.path is {tmp_path}/model, whose config.json has {part}: a multimodal "
        "model. Engines train the text part of gemma3, qwen2_5_vl, qwen2_vl, qwen3_5, "
        "qwen3_5_moe, qwen3_vl and qwen3_vl_moe only: give the folder of one of these, or of a "
        "text model."
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen2", "max_position_embeddings": 64},
        {"model_type": "qwen3_vl", "text_config": {"max_position_embeddings": 64}},
        # Files of Qwen2.5-VL have the settings of the text part at the top.
        {"model_type": "qwen2_5_vl", "max_position_embeddings": 64, "vision_config": {"depth": 1}},
    ],
)
def test_completion_that_leaves_no_position_for_a_prompt_is_refused(
    there: list[str], tmp_path: Path, fields: dict[str, object]
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    check_external_objects(load([*there, "sampling.max_tokens=63"]).config)
    assert refusal([*there, "sampling.max_tokens=64"]) == (
        f"sampling.max_tokens is 64, but the model in {tmp_path}/model has 64 positions "
        "(max_position_embeddings in its config.json), and a prompt needs some of these positions: "
        "lower sampling.max_tokens."
    )
    # A server of vLLM may have its own limit.
    served = [*there, "rollout.sampler=vllm", "rollout.vllm.max_model_len=48"]
    check_external_objects(load([*served, "sampling.max_tokens=47"]).config)
    assert refusal([*served, "sampling.max_tokens=48"]) == (
        "sampling.max_tokens is 48, but rollout.vllm.max_model_len is 48, and a prompt needs some "
        "of these positions: lower sampling.max_tokens."
    )


def test_tensor_parallelism_of_servers_must_divide_the_attention_heads(
    there: list[str], tmp_path: Path
) -> None:
    fields = {"model_type": "qwen2", "num_attention_heads": 14}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    served = [*there, "rollout.sampler=vllm"]
    check_external_objects(load([*served, "rollout.vllm.tensor_parallel_size=2"]).config)
    assert refusal([*served, "rollout.vllm.tensor_parallel_size=4"]) == (
        "rollout.vllm.tensor_parallel_size is 4, which does not divide the 14 attention heads of "
        f"the model in {tmp_path}/model: choose a divisor."
    )


def test_tensor_parallelism_must_divide_the_heads_of_an_architecture_and_of_a_teacher(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    built = [
        f"data.train.paths=[{tmp_path}/train.jsonl]",
        "actor.engine.model.architecture={model_type:qwen2,num_attention_heads:4}",
        "data.tokenizer.kind=word_level",
        "rollout.sampler=vllm",
    ]
    assert refusal([*built, "rollout.vllm.tensor_parallel_size=3"]) == (
        "rollout.vllm.tensor_parallel_size is 3, which does not divide the 4 attention heads in "
        "actor.engine.model.architecture: choose a divisor."
    )
    make_model(tmp_path / "teacher")
    fields = {"model_type": "qwen2", "num_attention_heads": 14}
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(fields))
    taught = [
        *(*built, "algorithm=distill", "task=distill"),
        f"teachers.math.engine.model.path={tmp_path}/teacher",
        "teachers.math.backend=vllm",
    ]
    assert refusal([*taught, "teachers.math.num_workers=4"]) == (
        "teachers.math.num_workers is 4, which does not divide the 14 attention heads of the model "
        f"in {tmp_path}/teacher: choose a divisor."
    )


def test_sampled_evaluation_of_a_saved_model_must_leave_a_position_for_a_prompt(
    there: list[str], tmp_path: Path
) -> None:
    fields = {"model_type": "qwen2", "max_position_embeddings": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    (tmp_path / "eval.jsonl").write_text('{"question": "What is 6 * 7?", "answer": "42"}\n')
    overrides = [
        *(each for each in there if not each.startswith("data.train")),
        "task=eval",
        f"data.eval.paths=[{tmp_path / 'eval.jsonl'}]",
        "run.eval_sampling.max_tokens=16",
        "sampling.max_tokens=64",
    ]
    check_external_objects(load(overrides).config)
    assert "sampling.max_tokens is 64" in refusal([*overrides, "run.eval_sampled=true"])


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma3_text", "vision_config": None},
        {"architectures": ["DeepseekV3ForCausalLM"]},
        {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}},
        {"model_type": "gemma3", "text_config": {}, "vision_config": {"hidden_size": 32}},
    ],
)
def test_text_model_is_accepted(there: list[str], tmp_path: Path, fields: object) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    check_external_objects(load(there).config)


def test_model_from_scratch_without_a_tokenizer_explains_how_to_train_one() -> None:
    text = refusal(["experiment=quickstart", "data.tokenizer.kind=pretrained"])
    assert text.startswith(
        "data.tokenizer.kind is pretrained, but neither data.tokenizer.path nor "
        "actor.engine.model.path is set"
    )


def test_unknown_reward_is_refused_before_the_run(there: list[str]) -> None:
    assert (
        "reward.function is 'gsm8k_stric', which is not a registered reward: did you mean"
        in refusal([*there, "reward.function=gsm8k_stric"])
    )


def test_sft_does_not_check_the_reward(there: list[str]) -> None:
    check_external_objects(load([*there, "task=sft"]).config)


def test_folder_with_a_run_is_refused_before_the_run(there: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    taken = [*there, f"run.dir={run}"]
    assert refusal(taken) == (
        f"run.dir {run} already contains a run: continue it with run.resume=auto, or "
        f"choose another run.dir."
    )
    check_external_objects(load([*taken, "run.resume=auto"]).config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train.paths", "[{dir}/samples.jsonl]"),
        ("+data.eval.paths", "[{dir}/samples.jsonl]"),
        ("data.tools_path", "{dir}/tools.yaml"),
        ("data.tokenizer.path", "{dir}/tokenizer"),
        ("actor.engine.model.path", "{dir}/huggingface"),
        ("actor.engine.model.path", "{dir}/warm_start/huggingface"),
        ("actor.engine.model.path", "{dir}"),
        ("actor.engine.model.path", "{dir}/../link-into-it"),
        ("+teachers.t.engine.model.path", "{dir}/huggingface"),
        ("runtime.rollout_python", "{dir}/env/bin/python"),
        ("+reward.arguments.answers", "{dir}/samples.jsonl"),
    ],
)
def test_input_inside_the_run_folder_is_refused_before_the_run(
    there: list[str], tmp_path: Path, key: str, value: str
) -> None:
    folder = tmp_path / "run"
    for name in ("samples.jsonl", "tools.yaml", "env/bin/python"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name in ("tokenizer", "huggingface", "warm_start/huggingface"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "link-into-it").symlink_to(folder / "huggingface")
    named = value.format(dir=folder)
    servers = ["rollout=vllm"] if key == "runtime.rollout_python" else []
    text = refusal([*there, *servers, f"run.dir={folder}", "run.resume=auto", f"{key}={named}"])
    assert (
        f"{key.removeprefix('+')} is {named.strip('[]')}, which is inside run.dir ({folder}), "
        "where the run writes, renames and replaces files: move it out of run.dir, or choose "
        "another run.dir."
    ) in text


def test_checkpoint_to_resume_from_may_be_inside_the_run_folder(
    there: list[str], tmp_path: Path
) -> None:
    (step,) = save_steps(tmp_path / "run", 1)
    check_external_objects(load([*there, f"run.dir={tmp_path}/run", f"run.resume={step}"]).config)


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs /proc (Linux), which root cannot write to either"
)
def test_run_folder_that_cannot_be_made_is_refused_in_the_words_of_the_run(
    there: list[str],
) -> None:
    text = refusal([*there, "run.dir=/proc/x"])
    with pytest.raises(ConfigError) as of_the_run, RunLock(Path("/proc/x")):
        pass
    assert text == str(of_the_run.value)
    assert text.startswith("run.dir /proc/x cannot be written: ")


def test_run_folder_with_a_name_that_is_too_long_is_refused(
    there: list[str], tmp_path: Path
) -> None:
    text = refusal([*there, f"run.dir={tmp_path}/{'x' * 300}"])
    assert "cannot be written: File name too long. Choose a shorter name." in text


def test_check_leaves_nothing_where_the_run_folder_will_be(
    there: list[str], tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    check_external_objects(load([*there, f"run.dir={tmp_path}/runs/new"]).config)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (os.mkfifo, "out.jsonl", "{} already exists and is never overwritten: choose another"),
        (Path.mkdir, "out.jsonl", "{} already exists and is never overwritten: choose another"),
        (Path.touch, "out.jsonl", "{} already exists and is never overwritten: choose another"),
        (os.mkfifo, ".out.jsonl.partial", "{} is a pipe or socket, but must be a file"),
        (Path.mkdir, ".out.jsonl.partial", "{} is a folder, but must be a file"),
    ],
)
def test_entry_in_place_of_the_generated_file_is_refused_before_the_run(
    there: list[str], tmp_path: Path, make: Callable[[Path], None], name: str, message: str
) -> None:
    generated = [
        *(*there, "task=generate", "warm_start=null"),
        *(f"run.dir={tmp_path}/run", "generate.file=out.jsonl"),
    ]
    (tmp_path / "run").mkdir()
    check_external_objects(load(generated).config)
    make(tmp_path / "run" / name)
    assert refusal(generated).startswith(message.format(tmp_path / "run" / name))


def test_generated_file_in_a_folder_that_cannot_be_made_is_refused(
    there: list[str], tmp_path: Path
) -> None:
    generated = [*there, "task=generate", "warm_start=null", f"run.dir={tmp_path}/run"]
    check_external_objects(load([*generated, "generate.file=new/folder/out.jsonl"]).config)
    (tmp_path / "taken").touch()
    assert refusal([*generated, f"generate.file={tmp_path}/taken/out.jsonl"]) == (
        f"{tmp_path}/taken/out.jsonl cannot be written: Not a directory. Choose another "
        "generate.file."
    )


def test_profile_folder_that_cannot_be_made_is_refused(there: list[str]) -> None:
    profiled = [*there, "actor.engine.profile_to=/proc/x"]
    assert refusal(profiled).startswith(
        "actor.engine: profile_to is /proc/x, which cannot be written: "
    )


def test_bind_address_of_another_host_is_refused(there: list[str]) -> None:
    # 192.0.2.0/24 is reserved for documentation, so no host has it.
    assert refusal([*there, "runtime.bind_address=192.0.2.1"]).startswith(
        "runtime.bind_address is 192.0.2.1, on which this host cannot listen: "
    )


def save_steps(run: Path, *steps: int, files: Mapping[str, str] | None = None) -> list[Path]:
    """Save checkpoints of a run as the trainer does, with an actor of 200 bytes and more files."""

    def write_weights(directory: str) -> list[PartReport]:
        Path(directory, "weights").write_bytes(bytes(200))
        for name, text in (files or {}).items():
            Path(directory, name).parent.mkdir()
            Path(directory, name).write_text(text)
        return [report_part(directory, ["weights", *(files or {})])]

    checkpointer = Checkpointer(root=run / "checkpoints", max_to_keep=None)
    states = [
        TrainerState(phase="rl", step=s, cursor=DataCursor(), weight_version=1, config_digest="ab")
        for s in steps
    ]
    return [
        checkpointer.save(state, roles={"actor": write_weights}, topology={}) for state in states
    ]


def test_checkpoint_after_the_end_of_the_run_is_refused(there: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    *_, last = save_steps(run, 2, 5)
    resumed = [*there, f"run.dir={run}", "run.resume=auto", "run.total_steps=3"]
    with pytest.raises(CheckpointError) as of_the_run:
        check_resume_step(5, total_steps=3, checkpoint=last)
    assert refusal(resumed) == str(of_the_run.value)
    assert str(of_the_run.value) == (
        f"{last} is at step 5, after run.total_steps = 3, so nothing is left to train: raise "
        "run.total_steps."
    )
    assert refusal([*resumed[:-2], f"run.resume={last}", "run.total_steps=3"]) == refusal(resumed)
    check_external_objects(load([*resumed, "run.total_steps=5"]).config)


def test_checkpoint_without_a_role_of_the_run_is_refused(there: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (step,) = save_steps(run, 2)
    assert refusal([*there, f"run.dir={run}", "run.resume=auto", "algorithm=ppo"]) == (
        f"{step} has no part for critic, which this configuration has: resume with the "
        "configuration of the run that wrote it."
    )


def test_damaged_checkpoint_after_the_end_of_the_run_is_skipped_as_in_the_run(
    there: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    *_, last = save_steps(run, 2, 5)
    (last / "actor" / "weights").write_bytes(bytes(199) + b"x")  # only its checksum shows it
    resumed = [*there, f"run.dir={run}", "run.resume=auto", "run.total_steps=3"]
    check_external_objects(load(resumed).config)
    assert last.is_dir(), "a check renames nothing"
    assert "is at step 5" in refusal([*resumed, "run.verify_checkpoints=size"])


@pytest.mark.parametrize(
    ("text", "damaged_text"), [(b"reward_mean", b"reward\x7fmean"), (b'"rl"', b'"sl"')]
)
def test_damaged_trainer_state_is_skipped_as_in_the_run(
    there: list[str], tmp_path: Path, text: bytes, damaged_text: bytes
) -> None:
    run = tmp_path / "run"
    *_, last = save_steps(run, 2, 5)
    state = last / "trainer" / "state.json"
    state.write_bytes(state.read_bytes().replace(text, damaged_text))
    # Its size is as recorded, so that only its checksum shows the damage.
    check_external_objects(load([*there, f"run.dir={run}", "run.resume=auto"]).config)
    assert f"{state} has another checksum" in refusal([*there, f"run.resume={last}"])


def test_checkpoint_of_another_phase_is_refused(there: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (step,) = save_steps(run, 2)
    assert refusal([*there, "task=sft", f"run.dir={run}", "run.resume=auto"]).startswith(
        f"{step} is a checkpoint of phase rl, but this run is in phase sft: "
    )


SMALL_MODEL = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 9}
SCRATCH = [
    "experiment=quickstart",
    "warm_start=null",
    "actor.engine.model.architecture.hidden_size=32",
    "actor.engine.model.architecture.num_hidden_layers=2",
    "run.resume=auto",
]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "actor.engine.model.architecture.hidden_size=64",
            "actor.engine.model.architecture has hidden_size 64, but the saved model has 32: ",
        ),
        ("actor.engine.lora={rank: 4, alpha: 8}", "actor.engine.lora is on, but the saved model "),
        ("run.seed=3", None),
    ],
)
def test_checkpoint_of_another_model_is_refused(
    tmp_path: Path, override: str, sentence: str | None
) -> None:
    run = tmp_path / "run"
    save_steps(run, 2, files={"huggingface/config.json": json.dumps(SMALL_MODEL)})
    overrides = [*SCRATCH, f"run.dir={run}", override]
    if sentence is None:
        check_external_objects(load(overrides).config)
    else:
        assert refusal(overrides).startswith(sentence)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ("{}", "actor.engine.lora is off, but the saved model has an adapter of rank 4"),
        ("{rank: 8, alpha: 8}", "actor.engine.lora.rank is 8, but the saved adapter has rank 4"),
        ("{rank: 4, alpha: 8}", None),
    ],
)
def test_checkpoint_of_another_adapter_is_refused(
    tmp_path: Path, lora: str, sentence: str | None
) -> None:
    run = tmp_path / "run"
    files = {
        "huggingface/config.json": json.dumps(SMALL_MODEL),
        "adapter/adapter_config.json": '{"r": 4}',
    }
    save_steps(run, 2, files=files)
    overrides = [*SCRATCH, f"run.dir={run}", f"actor.engine.lora={lora}"]
    if sentence is None:
        check_external_objects(load(overrides).config)
    else:
        assert refusal(overrides).startswith(sentence)


@pytest.mark.parametrize(
    ("saved", "requested"),
    [
        (SMALL_MODEL, SMALL_MODEL | {"hidden_size": 64}),
        (
            {"model_type": "qwen3_vl", "text_config": {"hidden_size": 32}},
            {"model_type": "qwen3_vl", "text_config": {"hidden_size": 64}},
        ),
        # transformers writes the settings of the text part below text_config.
        (
            {"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 32}},
            {"model_type": "qwen2_5_vl", "hidden_size": 64},
        ),
    ],
)
def test_checkpoint_of_another_saved_model_is_refused(
    there: list[str], tmp_path: Path, saved: dict[str, object], requested: dict[str, object]
) -> None:
    run = tmp_path / "run"
    save_steps(run, 2, files={"huggingface/config.json": json.dumps(saved)})
    (tmp_path / "model" / "config.json").write_text(json.dumps(requested))
    assert "config.json has hidden_size 64, but the saved model has 32" in refusal(
        [*there, f"run.dir={run}", "run.resume=auto"]
    )


def test_tied_embeddings_of_a_vision_language_model_are_compared_at_the_top(
    there: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    requested = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": {}}
    # transformers writes the default of the text part's class, which models do not read.
    saved = requested | {"text_config": {"tie_word_embeddings": False}}
    save_steps(run, 2, files={"huggingface/config.json": json.dumps(saved)})
    (tmp_path / "model" / "config.json").write_text(json.dumps(requested))
    check_external_objects(load([*there, f"run.dir={run}", "run.resume=auto"]).config)


def test_folder_without_a_checkpoint_is_refused_with_the_message_of_the_run(
    there: list[str], tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(IncompleteCheckpointError) as of_the_run:
        Checkpointer(root=tmp_path / "run", max_to_keep=None).find(str(empty))
    assert refusal([*there, f"run.resume={empty}"]) == str(of_the_run.value)
    assert "load another step directory" in str(of_the_run.value)


def test_misspelled_resume_lists_the_values(there: list[str], tmp_path: Path) -> None:
    assert refusal([*there, "run.resume=atuo"]).startswith(
        "run.resume is atuo, but there is no such directory: use never, auto, or "
    )


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_tracker_that_is_not_installed_is_named(
    there: list[str], monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = (
        f"run.trackers has {tracker}, but {tracker} is not installed: run "
        f"pip install './packages/trainer[{tracker}]' in a clone of Temper"
    )
    message = refusal([*there, f"run.trackers=[jsonl,{tracker}]"])
    assert message.startswith(expected)
    assert message.endswith(", or remove it from run.trackers.")


def test_prometheus_that_is_not_installed_is_named(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal([*there, "run.prometheus_port=9464"])
    assert message.startswith("run.prometheus_port is set, but prometheus_client is not installed")
    assert message.endswith(", or remove run.prometheus_port.")


def test_port_in_use_is_refused_before_the_run(there: list[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        expected = (
            f"run.prometheus_port is {port}, which cannot be opened on "
            f"run.prometheus_address 127.0.0.1: Address already in use."
        )
        assert expected in refusal([*there, f"run.prometheus_port={port}"])


def test_missing_extra_is_refused_before_the_run_but_not_by_a_check(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plain = "run.report=false run.trackers=[jsonl]"
    for setting, sentence in {
        f"{plain} runtime.kind=ray": (
            "runtime.kind is ray, but ray is not installed: run "
            f"{format_install('temper-trainer[ray]')}, or set runtime.kind=inline."
        ),
        f"{plain} rollout=vllm": (
            "rollout.sampler is vllm, but vLLM is not installed here: run "
            f"{format_install('temper-trainer[vllm]')}, or set"
        ),
        f"{plain} actor.engine.lora.rank=4 actor.engine.lora.alpha=8": (
            "actor.engine.lora is on, but peft is not installed: run "
            f"{format_install('temper-engine-fsdp[lora]')}."
        ),
        "": (
            "run.report is on, but matplotlib is not installed: run "
            f"{format_install('temper-trainer[report]')}, or set run.report=false."
        ),
        "run.report=false": (
            "run.trackers has tensorboard, but tensorboard is not installed: run "
            f"{format_install('temper-trainer[report]')}, or remove it from run.trackers."
        ),
    }.items():
        config = load([*there, *setting.split()]).config
        check_external_objects(config)
        with pytest.raises(ConfigError) as caught:
            check_libraries(config)
        assert str(caught.value).startswith(sentence)


def test_run_without_plots_needs_no_library_for_them(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_libraries(load([*there, "run.report=false", "run.trackers=[jsonl]"]).config)


def test_vllm_is_looked_for_here_if_ray_starts_its_cluster_here(there: list[str]) -> None:
    asks = [*there, "rollout=vllm", "rollout.pool=rollout", "runtime.kind=ray"]
    missing = "runtime.rollout_python=/nowhere/python"
    with pytest.raises(ConfigError, match="/nowhere/python, but there is no such program"):
        check_libraries(load([*asks, missing]).config)
    # Servers of an existing cluster may run on other hosts.
    check_libraries(load([*asks, missing, "runtime.address=10.0.0.1:6379"]).config)


@pytest.mark.parametrize("asks", ["rollout=vllm", "+teachers.t.backend=vllm"])
def test_missing_interpreter_of_the_servers_is_refused_before_the_run(
    there: list[str], tmp_path: Path, asks: str
) -> None:
    taught = [f"+teachers.t.engine.model.path={tmp_path}/model"] if "teachers" in asks else []
    config = load([*there, asks, *taught, "runtime.rollout_python=/nowhere/python"]).config
    check_external_objects(config)
    with pytest.raises(
        ConfigError,
        match=r"runtime\.rollout_python is /nowhere/python, but there is no such program",
    ):
        check_libraries(config)


def test_run_on_servers_that_others_started_needs_no_vllm_here(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
    on_servers = ["rollout=vllm", "rollout.vllm.servers=[127.0.0.1:8100]"]
    missing = "runtime.rollout_python=/nowhere/python"
    check_libraries(load([*there, *on_servers, missing]).config)
    with pytest.raises(ConfigError, match="there is no such program"):
        check_libraries(load([*there, "rollout=vllm", missing]).config)


def test_missing_or_short_secret_of_servers_is_named_before_the_run(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    config = load([*there, "rollout=vllm", "rollout.vllm.servers=[127.0.0.1:8100]"]).config
    check_external_objects(config)
    with pytest.raises(ConfigError, match=r"TEMPER_SERVER_TOKEN is not set: set it to the same"):
        check_libraries(config)
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcde")
    with pytest.raises(ConfigError, match=r"_TOKEN has 15 characters, but must have at least 16:"):
        check_libraries(config)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        ("# none\n", "has no address"),
        ("127.0.0.1:8100\n127.0.0.1:x\n", "has the line '127.0.0.1:x'"),
        ("127.0.0.1:65536\n", "has the line '127.0.0.1:65536'"),
    ],
)
def test_wrong_file_of_servers_is_refused_before_the_run(
    there: list[str], tmp_path: Path, content: str | None, problem: str
) -> None:
    file = tmp_path / "servers"
    if content is not None:
        file.write_text(content)
    named = f"rollout.vllm.servers_file={file}"
    assert f"rollout.vllm.servers_file {problem}" in refusal([*there, "rollout=vllm", named])


@pytest.mark.skipif(find_spec("vllm") is not None, reason="needs an environment without vLLM")
def test_folder_named_like_a_library_is_not_taken_for_it(
    there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("vllm") is not None
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        check_libraries(load([*there, "rollout=vllm"]).config)


def test_unknown_environment_is_refused_before_the_run(there: list[str]) -> None:
    assert (
        "environment.name is 'calculater', but must be calculator or python or agent or gymnasium "
        "or mcp or openenv, or the import path" in refusal([*there, "+environment.name=calculater"])
    )
    assert "environment.name names 'Missing' in fractions" in refusal(
        [*there, "+environment.name=fractions:Missing"]
    )
    assert "environment.name is json:loads, which is not a class" in refusal(
        [*there, "+environment.name=json:loads"]
    )
    assert (
        "environment.name fractions:Fraction cannot be created with config, tokenizer and"
        in refusal([*there, "+environment.name=fractions:Fraction"])
    )
    check_external_objects(load([*there, "+environment.name=collections:UserDict"]).config)


def test_agent_that_cannot_be_started_is_refused_before_the_run(there: list[str]) -> None:
    agent = [*there, "+environment.name=agent"]
    assert "environment.arguments.function names 'missing' in json" in refusal(
        [*agent, "+environment.arguments={function: 'json:missing'}"]
    )
    assert "address" in refusal(
        [*agent, "+environment.arguments={command: sh, address: '0.0.0.0'}"]
    )
    check_external_objects(load([*agent, "+environment.arguments={command: 'sh agent.sh'}"]).config)


@pytest.mark.parametrize("name", ["agent", "mcp"])
@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("no-such-program --stdio", "but there is no program no-such-program: install it"),
        ("{folder}/train.jsonl", "but there is no program {folder}/train.jsonl: install it"),
        ("sh -c 'exit", "which cannot be split into words (No closing quotation)"),
        ("''", "but there is no program '': install it"),
        ("", "environment.arguments.command is empty: give a program"),
    ],
)
def test_command_that_is_no_program_is_refused_before_the_run(
    there: list[str], tmp_path: Path, name: str, command: str, problem: str
) -> None:
    value = json.dumps(command.format(folder=tmp_path))
    message = refusal(
        [*there, f"+environment.name={name}", f"+environment.arguments={{command: {value}}}"]
    )
    assert problem.format(folder=tmp_path) in message


def test_python_tool_without_its_sandbox_is_refused_before_the_run(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_sandbox.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "the program bwrap is not installed" in refusal([*there, "+environment.name=python"])
    check_external_objects(
        load([*there, "+environment.name=python", "environment.sandbox=none"]).config
    )


def test_home_directory_is_expanded_only_in_paths(
    there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = [
        "data.train.paths=['~/train.jsonl']",
        "actor.engine.model.path='~/model'",
        "run.dir='~/run'",
        "data.prompt_template='~/{prompt}'",
    ]
    config = load(own).config
    check_external_objects(config)
    assert config.run.dir == f"{tmp_path}/run"
    assert config.data.train.paths == (f"{tmp_path}/train.jsonl",)
    assert config.data.prompt_template == "~/{prompt}"


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            '{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n{"question": \n',
            "train.jsonl:3: not a JSON object",
        ),
        ('{"problem": "a", "answer": "b"}\n', "train.jsonl:1: there is no field 'question'"),
        ('["a"]\n', "train.jsonl:1: expected an object with fields 'question' and 'answer'"),
    ],
)
def test_broken_row_is_refused_before_the_run(
    there: list[str], tmp_path: Path, rows: str, sentence: str
) -> None:
    (tmp_path / "train.jsonl").write_text(rows)
    assert sentence in refusal(there)


def test_name_on_the_hub_explains_how_to_download_it(there: list[str]) -> None:
    text = refusal([*there, "actor.engine.model.path=Qwen/Qwen2.5-0.5B"])
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B" in text


def test_truncated_weights_are_named(there: list[str], tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    check_external_objects(load(there).config)
    for size in (20, len(WEIGHTS) - 1):
        weights.write_bytes(WEIGHTS[:size])
        assert f"{weights} has {size} bytes" in refusal(there)
    weights.write_bytes(b"")
    assert f"{weights} is empty" in refusal(there)


def test_empty_weights_of_any_format_are_named(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    weights = tmp_path / "model" / "pytorch_model.bin"
    weights.write_bytes(b"")
    assert f"actor.engine.model.path: {weights} is empty" in refusal(there)


def test_truncated_weights_of_torch_are_named(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    weights = tmp_path / "model" / "pytorch_model.bin"
    torch.save({"weight": torch.ones(64)}, weights)
    check_external_objects(load(there).config)
    complete = weights.read_bytes()
    for content in (complete[:-1000], bytes(range(256))):
        weights.write_bytes(content)
        assert f"{weights} is truncated, or was not written by torch.save" in refusal(there)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_pointer_of_git_lfs_in_place_of_weights_is_named(
    there: list[str], tmp_path: Path, name: str
) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    weights = tmp_path / "model" / name
    weights.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 988097824\n"
    )
    assert f"{weights} is a pointer of git-lfs without the weights: run git lfs" in refusal(there)


def test_web_page_in_place_of_weights_is_named(there: list[str], tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_text("<!DOCTYPE html>\n<html><body>Sign in</body></html>\n")
    assert f"{weights} is a web page in place of weights: download the file" in refusal(there)


def test_link_to_missing_weights_is_named(there: list[str], tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "gone")
    assert f"{weights} is a link to {tmp_path}/gone, which is not there: copy" in refusal(there)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_folder_in_place_of_weights_is_named(there: list[str], tmp_path: Path, name: str) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    weights = tmp_path / "model" / name
    weights.mkdir()
    assert f"{weights} is not a file: copy or download the weights" in refusal(there)


def test_tensor_of_the_index_that_its_file_lacks_is_named(there: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "model.safetensors"}}')
    check_external_objects(load(there).config)
    index.write_text('{"weight_map": {"w": "model.safetensors", "v": "model.safetensors"}}')
    assert (
        f"{folder}/model.safetensors has no tensor v, which {index} expects there: copy or "
        "download the directory again."
    ) in refusal(there)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("vocab_size", "320", "Field 'vocab_size' expected int, got str (value: '320')"),
        ("hidden_size", "32", "Field 'hidden_size' expected int, got str (value: '32')"),
        ("num_hidden_layers", -1, "`num_hidden_layers` (-1) must be equal to"),
    ],
)
def test_setting_of_a_model_that_transformers_refuses_is_named(
    there: list[str], tmp_path: Path, field: str, value: object, problem: str
) -> None:
    layers = ["full_attention"] * 2
    fields = {"model_type": "qwen2", "num_hidden_layers": 2, "layer_types": layers, field: value}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    # The setting makes the engine check the model.
    loaded = load([*there, "actor.engine.precision.compute=fp32"])
    with pytest.raises(ConfigError) as caught:
        check_models(loaded)
    text = str(caught.value)
    assert f"{tmp_path}/model/config.json has an invalid setting: " in text
    assert problem in text
    assert text.endswith("Correct it, or copy or download the file again.")


@pytest.mark.parametrize("size", [0, 20, len(WEIGHTS) - 1])
def test_truncated_weights_of_an_adapter_are_named(
    there: list[str], tmp_path: Path, size: int
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(WEIGHTS[:size])
    text = refusal([*there, f"actor.engine.lora.path={tmp_path}/adapter"])
    assert text.startswith(f"actor.engine.lora.path: {weights} ")


def test_adapter_without_a_base_is_refused_before_the_run(there: list[str], tmp_path: Path) -> None:
    overrides = [
        there[0],
        "rollout=vllm",
        "weight_sync.content=adapter",
        "actor.engine.lora.rank=4",
        "actor.engine.lora.alpha=8",
        "actor.engine.model.architecture={model_type: qwen2}",
        "data.tokenizer.kind=word_level",
    ]
    assert "servers have no base to put the adapter on" in refusal(overrides)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ("{rank: 1024, alpha: 8}", "has rank 1024, but vLLM serves adapters up to rank 512: "),
        ("{rank: 4, alpha: 8, dora: true}", "has DoRA, which vLLM does not serve: "),
        ("{rank: 4, alpha: 8, modules_to_save: [lm_head]}", "has modules_to_save (lm_head), "),
    ],
)
def test_adapter_that_vllm_cannot_serve_is_refused(
    there: list[str], lora: str, sentence: str
) -> None:
    servers = ["rollout=vllm", "weight_sync.content=adapter", f"actor.engine.lora={lora}"]
    assert f"and actor.engine.lora {sentence}" in refusal([*there, *servers])
    check_external_objects(load([*there, "rollout=vllm", servers[-1]]).config)


def test_saved_adapter_is_served_with_its_own_rank(there: list[str], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 16, "use_dora": true}')
    (adapter / "adapter_model.safetensors").write_bytes(WEIGHTS)
    spec = LoraSpec(path=str(adapter))
    served = ServedAdapter.from_spec(spec)
    assert served is not None
    assert served.server_rank == 16
    servers = ["rollout=vllm", "weight_sync.content=adapter", f"actor.engine.lora.path={adapter}"]
    assert f"actor.engine.lora.path {adapter} has DoRA" in refusal([*there, *servers])


MATRICES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize(
    ("model_type", "experts", "sentence"),
    [
        ("qwen3_moe", MATRICES, "which vLLM loads for gpt_oss, qwen3_5_moe and qwen3_vl_moe only"),
        ("gpt_oss", MATRICES[1:], "but vLLM needs both gate_up_proj and down_proj of experts"),
        ("gpt_oss", MATRICES, None),
    ],
)
def test_adapted_experts_that_vllm_cannot_load_are_refused(
    there: list[str],
    tmp_path: Path,
    model_type: str,
    experts: tuple[str, ...],
    sentence: str | None,
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    lora = f"{{rank: 4, alpha: 8, target_parameters: [{', '.join(experts)}]}}"
    servers = ["rollout=vllm", "weight_sync.content=adapter", f"actor.engine.lora={lora}"]
    if sentence is None:
        check_external_objects(load([*there, *servers]).config)
        return
    assert sentence in refusal([*there, *servers])


@pytest.mark.parametrize(
    ("build", "num_experts", "is_refused"),
    [("2.13.0+cpu", 4, True), ("2.13.0+cpu", 0, False), ("2.13.0+cu130", 4, False)],
)
def test_adapter_of_a_model_with_experts_is_refused_on_cpu_servers(
    there: list[str], tmp_path: Path, build: str, num_experts: int, is_refused: bool
) -> None:
    fields = {"model_type": "qwen3_moe", "num_experts": num_experts}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    packages = VLLM_ENVIRONMENT["packages"] | {"torch": build}
    python = interpreter(tmp_path, says=json.dumps(VLLM_ENVIRONMENT | {"packages": packages}))
    servers = [
        "rollout=vllm",
        f"runtime.rollout_python={python}",
        "weight_sync.content=adapter",
        "actor.engine.lora={rank: 4, alpha: 8}",
    ]
    if not is_refused:
        check_external_objects(load([*there, *servers]).config)
        return
    assert "which serves no adapters of models with experts: set" in refusal([*there, *servers])


def test_adapter_on_the_model_of_a_warm_start_is_accepted() -> None:
    overrides = [
        "experiment=quickstart",
        "rollout=vllm",
        "weight_sync.content=adapter",
        "actor.engine.lora.rank=4",
        "actor.engine.lora.alpha=8",
    ]
    check_external_objects(load(overrides).config)


@pytest.mark.parametrize(
    ("overrides", "row", "sentence"),
    [
        ((), {"question": "a"}, "there is no field 'answer'"),
        (
            ("task=sft", "data.train.messages_key=messages"),
            {"question": "a"},
            "there is no field 'messages'",
        ),
        (
            ("task=sft", "data.train.messages_key=m"),
            {"m": [{"role": "user", "content": "a"}]},
            "one of role assistant",
        ),
        (
            ("task=dpo", "ref=frozen"),
            {"question": "a", "chosen": "b"},
            (
                "there is no field 'rejected' among ['chosen', 'question']: correct the row, or "
                "set rejected_key"
            ),
        ),
        (
            ("task=dpo", "ref=frozen"),
            {"question": "a", "chosen": "b", "rejected": "b"},
            "'chosen' and 'rejected' are equal",
        ),
    ],
)
def test_first_row_that_the_task_cannot_read_is_refused(
    there: list[str],
    tmp_path: Path,
    overrides: tuple[str, ...],
    row: dict[str, object],
    sentence: str,
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    text = refusal([*there, *overrides])
    assert text.startswith(f"data.train: {tmp_path}/train.jsonl:1: ")
    assert sentence in text


def test_parquet_columns_are_compared_with_the_keys(there: list[str], tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"question": ["a"], "solution": ["b"]}), path)
    taken = [*there, "data.train.name=parquet", f"data.train.paths=[{path}]"]
    assert (
        "expected columns 'question' and 'answer', but it has ['question', 'solution']"
        in refusal(taken)
    )
    check_external_objects(load([*taken, "data.train.answer_key=solution"]).config)
    path.write_bytes(b"PAR1")
    assert f"{path} is not a readable parquet file" in refusal(taken)


def test_file_without_rows_is_refused(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n")
    assert refusal(there) == (
        f"data.train.paths is [{tmp_path}/train.jsonl], which has no rows: give files with rows."
    )


def test_chat_messages_without_a_template_are_refused(there: list[str], tmp_path: Path) -> None:
    row = {"question": [{"role": "user", "content": "1+1?"}], "answer": "2"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    assert refusal(there).startswith(
        "data.train has chat messages, but the tokenizer has no chat template: set "
        "data.chat_template"
    )
    check_external_objects(load([*there, "data.chat_template=x"]).config)
    (tmp_path / "model" / "chat_template.jinja").write_text("x")
    check_external_objects(load(there).config)


def test_string_prompts_as_messages_need_a_template(there: list[str]) -> None:
    taken = [*there, "data.string_prompts=user_message"]
    assert refusal(taken).startswith(
        "data.string_prompts is user_message, but the tokenizer has no chat template"
    )


def test_route_without_a_teacher_is_refused(there: list[str], tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "b", "kind": kind} for kind in ("math", "code")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    teachers = [f"+teachers.{name}.engine.model.path={tmp_path}/model" for name in ("math", "law")]
    text = refusal([*there, "algorithm=distill", "data.train.route_key=kind", *teachers])
    assert "rows have the route 'code', which no teacher has" in text
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b", "kind": 1}')
    text = refusal([*there, "algorithm=distill", "data.train.route_key=kind", *teachers])
    assert "field 'kind', which route_key names, must be text" in text


@pytest.mark.parametrize("key", ["actor.engine.model.path", "data.tokenizer.path"])
def test_folder_without_tokenizer_files_is_refused(
    there: list[str], tmp_path: Path, key: str
) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    sentence = f"{key} is {tmp_path}/model, which has no tokenizer files (such as tokenizer.json)"
    assert sentence in refusal([*there, f"{key}={tmp_path}/model"])
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "ByT5Tokenizer"}'
    )
    check_external_objects(load([*there, f"{key}={tmp_path}/model"]).config)


def test_teacher_without_tokenizer_files_is_refused(there: list[str], tmp_path: Path) -> None:
    make_model(tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.json").unlink()
    text = refusal(
        [*there, "algorithm=distill", f"+teachers.t.engine.model.path={tmp_path}/teacher"]
    )
    assert text.startswith(
        f"teachers.t.engine.model.path is {tmp_path}/teacher, which has no tokenizer files"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "config.json is not JSON ("),
        ("\ufeff{}", "config.json is not JSON (it starts with a byte order mark: save it as UTF-8"),
        ("[]", "config.json is a list, but must be a JSON object"),
        (
            '{"model_type": "qwen0"}',
            (
                "actor.engine.model.path: model_type is 'qwen0', which the installed "
                "transformers does not know"
            ),
        ),
    ],
)
def test_config_of_a_model_that_cannot_be_loaded_is_refused(
    there: list[str], tmp_path: Path, content: str, sentence: str
) -> None:
    (tmp_path / "model" / "config.json").write_text(content)
    assert sentence in refusal(there)


def test_model_type_with_remote_code_is_accepted(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}'
    )
    assert "model_type is 'own'" in refusal(there)
    check_external_objects(load([*there, "actor.engine.model.trust_remote_code=true"]).config)


def test_unknown_architecture_of_a_model_from_scratch_is_refused() -> None:
    text = refusal(["experiment=quickstart", "actor.engine.model.architecture.model_type=qwen0"])
    assert text.startswith(
        "actor.engine.model.architecture.model_type is 'qwen0', which the installed transformers "
        "does not know"
    )


def test_model_without_weights_or_with_a_missing_shard_is_refused(
    there: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}'
    )
    assert "model.safetensors.index.json names other.safetensors, which is not there" in refusal(
        there
    )
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink()
    assert f"{folder} has no weights" in refusal(there)


def test_missing_initial_adapter_is_refused(there: list[str], tmp_path: Path) -> None:
    text = refusal([*there, f"actor.engine.lora.path={tmp_path}"])
    assert text.startswith(
        f"actor.engine.lora.path is {tmp_path}, but there is no PEFT adapter in that folder"
    )


def test_run_folder_that_cannot_be_created_is_refused(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal([*there, f"run.dir={tmp_path}/file/run"]).startswith(
        f"run.dir is {tmp_path}/file/run, but {tmp_path}/file is a file"
    )


def interpreter(folder: Path, *, says: str, status: int = 0) -> str:
    """Write a program that answers as a Python with packages of servers would."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("packages", "sentence"),
    [
        ({}, "has no temper-trainer and no temper-engine-api: run"),
        ({}, "pip install --no-deps ./packages/trainer ./packages/engine-api in a clone"),
        ({}, "It has no vLLM either: rollout.sampler is vllm."),
        ({"temper_trainer": "", "temper_engine_api": ""}, "has no vLLM, which rollout=vllm needs"),
        (
            {"temper_trainer": "", "temper_engine_api": "", "vllm": "0.9.2"},
            "has vLLM 0.9.2, but at least 0.26 is needed",
        ),
        ({"vllm": "0.32.0", "temper_engine_api": ""}, "which has no temper-trainer: run"),
        ({"temper_trainer": "", "temper_engine_api": "", "vllm": "0.32.0"}, None),
    ],
)
def test_versions_of_the_servers_interpreter_are_checked_before_the_run(
    there: list[str], tmp_path: Path, packages: dict[str, str], sentence: str | None
) -> None:
    python = interpreter(tmp_path, says=json.dumps({"packages": packages}))
    config = load([*there, "rollout=vllm", f"runtime.rollout_python={python}"]).config
    if sentence is None:
        check_libraries(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_libraries(config)
    assert sentence in str(caught.value)


def test_interpreter_that_fails_is_named(there: list[str], tmp_path: Path) -> None:
    python = interpreter(tmp_path, says="", status=3)
    with pytest.raises(ConfigError, match=r"could not list its packages \(exit status 3\)"):
        check_libraries(load([*there, "rollout=vllm", f"runtime.rollout_python={python}"]).config)


def test_text_before_the_list_of_packages_is_ignored(there: list[str], tmp_path: Path) -> None:
    packages = {"temper_trainer": "", "temper_engine_api": "", "vllm": "0.32.0"}
    python = interpreter(tmp_path, says="welcome\n" + json.dumps({"packages": packages}))
    check_libraries(load([*there, "rollout=vllm", f"runtime.rollout_python={python}"]).config)


@pytest.mark.parametrize("text", ["", "hello", "[]"])
def test_program_that_is_no_python_is_refused(there: list[str], tmp_path: Path, text: str) -> None:
    python = interpreter(tmp_path, says=text)
    with pytest.raises(
        ConfigError, match=rf"could not list its packages \(it printed '{re.escape(text)}'"
    ):
        check_libraries(load([*there, "rollout=vllm", f"runtime.rollout_python={python}"]).config)


def test_hanging_interpreter_is_not_refused_before_the_run(
    there: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm_environment, "_LIST_TIMEOUT_S", 0.2)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    check_libraries(load([*there, "rollout=vllm", f"runtime.rollout_python={program}"]).config)
    assert "did not list its packages within 0.2 s" in caplog.text


def test_interpreter_of_this_environment_lists_its_packages() -> None:
    environment = vllm_environment.describe_environment(sys.executable)
    assert environment is not None
    assert {"temper_trainer", "temper_engine_api", "torch"} <= environment["packages"].keys()


VLLM_ENVIRONMENT: dict[str, Any] = {
    "packages": {"temper_trainer": "", "temper_engine_api": "", "vllm": "0.32.0"},
    "arguments": ["block_size", "load_format", "hf_token"],
    "load_formats": ["auto", "dummy"],
}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("+{key}.engine_kwargs.block_sizes=16", "which vLLM 0.32.0 in {python} does not have: did"),
        ("+{key}.engine_kwargs.block_sizes=16", "you mean block_size?"),
        ("+{key}.engine_kwargs.zzz=1", "remove it, or see the fields of vllm.EngineArgs."),
        ("{key}.load_format=dumy", "which vLLM 0.32.0 in {python} does not have: use auto or dum"),
        ("+{key}.engine_kwargs.block_size=16", None),
        ("{key}.load_format=auto", None),
    ],
)
def test_arguments_that_vllm_does_not_have_are_refused(
    there: list[str], tmp_path: Path, setting: str, sentence: str | None
) -> None:
    python = interpreter(tmp_path, says=json.dumps(VLLM_ENVIRONMENT))
    override = setting.format(key="rollout.vllm")
    servers = [*there, "rollout=vllm", f"runtime.rollout_python={python}", override]
    if sentence is None:
        check_external_objects(load(servers).config)
        return
    assert sentence.format(python=python) in refusal(servers)
    # Without vLLM here, and with servers that others started, its arguments are not known.
    check_external_objects(load([*there, "rollout=vllm", override]).config)
    on_servers = [*servers, "rollout.vllm.servers=[127.0.0.1:8100]"]
    if "load_format" not in override:  # no effect with such servers
        check_external_objects(load(on_servers).config)


def test_missing_library_of_a_data_source_is_refused_before_the_run(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    others = [each for each in there if not each.startswith("data.train.")]
    config = load([*others, "data.train=datasets", "data.train.path=name"]).config
    with pytest.raises(ConfigError, match="datasets is not installed"):
        check_libraries(config)


@pytest.mark.parametrize(
    ("row", "overrides", "sentence"),
    [
        ("a b c d e f", ["data.max_prompt_tokens=5"], "the prompt has at least 6 tokens, but"),
        ("ends <eos> here", [], "contains one of the special tokens"),
        ("a b", ["+actor.engine.model.architecture.vocab_size=5"], "has at least 259 entries"),
    ],
)
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_rows_that_do_not_fit_the_trained_tokenizer_are_refused(
    tmp_path: Path, row: str, overrides: list[str], sentence: str, resume: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": row, "answer": "1"}) + "\n")
    settings = ["experiment=gsm8k_sft", f"data.train.paths=[{path}]", f"run.dir={tmp_path}/run"]
    keys = ["data.train.prompt_key=question", "data.train.answer_key=answer"]
    bpe = ["data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=259", f"run.resume={resume}"]
    with pytest.raises(ConfigError, match=sentence):
        check_external_objects(load([*settings, *keys, *bpe, *overrides]).config)


@pytest.mark.parametrize("key", ["data.train", "data.eval", "warm_start.data"])
def test_generated_prompts_that_are_too_long_are_refused_before_the_run(key: str) -> None:
    check_external_objects(load(["experiment=quickstart"]).config)
    with pytest.raises(ConfigError, match=rf"{key}: arithmetic\[\w+\] row \d+: the prompt has at"):
        check_external_objects(load(["experiment=quickstart", "data.max_prompt_tokens=20"]).config)


def test_missing_record_of_completions_is_refused_before_the_run(tmp_path: Path) -> None:
    record = tmp_path / "completions.jsonl"
    assert "rollout.replay is" in refusal(["experiment=quickstart", f"rollout.replay={record}"])


def test_evaluation_prompts_that_are_too_long_are_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "a b c d e f", "answer": "1"}) + "\n")
    settings = ["experiment=quickstart", "data.eval.name=jsonl", f"data.eval.paths=[{path}]"]
    config = load([*settings, "warm_start=null", "data.train.max_rows=1"]).config
    check_external_objects(config)
    limited = replace(config, data=replace(config.data, max_prompt_tokens=5))
    with pytest.raises(ConfigError, match=r"data\.eval: .*rows\.jsonl:1: the prompt has at"):
        check_external_objects(limited)


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (["actor.num_workers=3"], True),
        (["actor.num_workers=2"], False),
        (["actor.num_workers=3", "runtime.cpus_per_worker=0.5"], False),
        # On other hosts than this one.
        (["actor.num_workers=3", "runtime.address=10.0.0.1:6379"], False),
        (["actor.num_workers=3", "runtime.gpus_per_worker=1", "actor.engine.device=cuda"], False),
    ],
)
def test_more_ray_workers_than_cpus_of_this_host_are_refused_before_the_run(
    overrides: list[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load(["experiment=quickstart", "runtime.kind=ray", *overrides]).config
    if not is_refused:
        check_libraries(config)
        return
    with pytest.raises(ConfigError, match=r"need 3 CPU and 0 GPU, but the cluster has 2 and 0"):
        check_libraries(config)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_libraries(config)
