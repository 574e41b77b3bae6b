import json
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import external_checks, load
from temper_trainer.config_loading.external_checks import check_external_objects, check_libraries
from temper_trainer.environment.sandbox import open_sandbox

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


def test_what_is_there_is_accepted(there: list[str]) -> None:
    check_external_objects(load(there).config)


def test_missing_data_file_is_named(there: list[str]) -> None:
    assert refusal([*there, "data.eval.paths=[gone.jsonl]"]).startswith(
        "data.eval.paths names gone.jsonl, which is not a file (relative to "
    )


def test_missing_file_of_tools_is_named(there: list[str], tmp_path: Path) -> None:
    assert refusal([*there, "data.tools_path=tools.yaml"]).startswith(
        "data.tools_path is tools.yaml, which is not a file (relative to "
    )
    (tmp_path / "tools.yaml").write_text("[]\n")
    check_external_objects(load([*there, f"data.tools_path={tmp_path}/tools.yaml"]).config)


def test_addresses_with_a_scheme_are_left_to_the_run(there: list[str]) -> None:
    check_external_objects(load([*there, "data.eval.paths=['s3://bucket/test.jsonl']"]).config)


def test_directory_without_a_model_is_named(there: list[str], tmp_path: Path) -> None:
    text = refusal([*there, f"actor.engine.model.path={tmp_path}"])
    assert text.startswith(
        f"actor.engine.model.path is {tmp_path}, but there is no Hugging Face model in that folder (no config.json)"
    )


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (
            {
                "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                "model_type": "qwen2_5_vl",
                "vision_config": {"depth": 32},
            },
            "vision_config",
        ),
        ({"model_type": "qwen2_vl"}, "model_type qwen2_vl"),
        ({"architectures": ["LlavaForCausalLM"]}, "LlavaForCausalLM"),
        (
            {"architectures": ["XForConditionalGeneration"], "text_config": {"hidden_size": 8}},
            "XForConditionalGeneration",
        ),
    ],
)
def test_a_model_that_sees_is_refused_before_the_run(
    there: list[str], tmp_path: Path, fields: dict[str, object], part: str
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    assert refusal(there) == (
        f"actor.engine.model.path is {tmp_path}/model, whose config.json has {part}: a multimodal model, which "
        "no engine can train. Give the folder of a text model."
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma3_text", "vision_config": None},
        {"architectures": ["DeepseekV3ForCausalLM"]},
    ],
)
def test_a_model_that_only_reads_is_accepted(
    there: list[str], tmp_path: Path, fields: object
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    check_external_objects(load(there).config)


def test_model_from_scratch_without_a_tokenizer_is_told_how_to_train_one() -> None:
    text = refusal(["experiment=quickstart", "data.tokenizer.kind=pretrained"])
    assert text.startswith(
        "data.tokenizer.kind is pretrained, but neither data.tokenizer.path nor actor.engine.model.path is set"
    )


def test_unknown_reward_is_refused_before_the_run(there: list[str]) -> None:
    assert (
        "reward.function is 'gsm8k_stric', which is not a registered reward: did you mean"
        in refusal([*there, "reward.function=gsm8k_stric"])
    )


def test_sft_asks_for_no_reward(there: list[str]) -> None:
    check_external_objects(load([*there, "task=sft"]).config)


def test_folder_that_holds_a_run_is_refused_before_the_run(
    there: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    taken = [*there, f"run.dir={run}"]
    assert (
        refusal(taken)
        == f"run.dir {run} already contains a run: continue it with run.resume=auto, or choose another run.dir."
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
def test_an_input_inside_the_run_folder_is_refused_before_the_run(
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
        f"{key.removeprefix('+')} is {named.strip('[]')}, which is inside run.dir ({folder}), where the run "
        "writes, renames and replaces files: move it out of run.dir, or choose another run.dir."
    ) in text


def test_the_checkpoint_to_resume_from_may_be_inside_the_run_folder(
    there: list[str], tmp_path: Path
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    check_external_objects(load([*there, f"run.dir={tmp_path}/run", f"run.resume={step}"]).config)


def test_misspelt_resume_is_told_what_there_is(there: list[str], tmp_path: Path) -> None:
    assert refusal([*there, "run.resume=atuo"]).startswith(
        "run.resume is atuo, but there is no such directory: use never, auto, or "
    )
    check_external_objects(load([*there, f"run.resume={tmp_path}"]).config)


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_tracker_that_is_not_installed_is_named(
    there: list[str], monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = f"run.trackers has {tracker}, which is not installed: pip install 'temper-trainer[{tracker}]'"
    assert refusal([*there, f"run.trackers=[jsonl,{tracker}]"]).startswith(expected)


def test_prometheus_that_is_not_installed_is_named(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal([*there, "run.prometheus_port=9464"]).startswith(
        "run.prometheus_port is set, but prometheus_client is not installed"
    )


def test_a_port_in_use_is_refused_before_the_run(there: list[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        expected = f"run.prometheus_port is {port}, which cannot be opened on run.prometheus_address 127.0.0.1: Address already in use."
        assert expected in refusal([*there, f"run.prometheus_port={port}"])


def test_library_of_an_extra_is_missed_before_the_run_and_not_by_a_check(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for setting, sentence in {
        "runtime.kind=ray": "runtime.kind is ray, but Ray is not installed: pip install 'temper-trainer[ray]', or use inline.",
        "rollout=vllm": "rollout.sampler is vllm, but vLLM is not installed here: pip install 'temper-trainer[vllm]', or set",
        "actor.engine.lora.rank=4 actor.engine.lora.alpha=8": (
            "actor.engine.lora is on, but peft is not installed: pip install 'temper-engine-fsdp[lora]'."
        ),
    }.items():
        config = load([*there, *setting.split()]).config
        check_external_objects(config)
        with pytest.raises(ConfigError) as caught:
            check_libraries(config)
        assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("asks", ["rollout=vllm", "+teachers.t.backend=vllm"])
def test_interpreter_of_the_servers_that_is_not_there_is_missed_before_the_run(
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


@pytest.mark.skipif(find_spec("vllm") is not None, reason="needs an environment without vLLM")
def test_folder_with_the_name_of_a_library_is_not_that_library(
    there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("vllm") is not None
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        check_libraries(load([*there, "rollout=vllm"]).config)


def test_environment_that_is_not_there_is_refused_before_the_run(there: list[str]) -> None:
    assert (
        "environment.name is 'calculater', but must be calculator or python, or the import path"
        in refusal([*there, "+environment.name=calculater"])
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


def test_python_tool_without_its_sandbox_is_refused_before_the_run(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_sandbox.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "the program bwrap is not installed" in refusal([*there, "+environment.name=python"])
    check_external_objects(
        load([*there, "+environment.name=python", "environment.sandbox=none"]).config
    )


def test_home_directory_is_found_in_paths_and_nowhere_else(
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


def test_name_on_the_hub_is_told_how_to_download_it(there: list[str]) -> None:
    text = refusal([*there, "actor.engine.model.path=Qwen/Qwen2.5-0.5B"])
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B" in text


def test_weights_that_are_cut_off_are_named(there: list[str], tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    check_external_objects(load(there).config)
    for size in (0, 20, len(WEIGHTS) - 1):
        weights.write_bytes(WEIGHTS[:size])
        assert f"{weights} has {size} bytes" in refusal(there)


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
            "there is no field 'rejected' among ['chosen', 'question']: correct the row, or set rejected_key",
        ),
        (
            ("task=dpo", "ref=frozen"),
            {"question": "a", "chosen": "b", "rejected": "b"},
            "'chosen' and 'rejected' are equal",
        ),
    ],
)
def test_a_first_row_that_the_task_cannot_read_is_refused(
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
    taken = [*there, "data.train.kind=parquet", f"data.train.paths=[{path}]"]
    assert (
        "expected columns 'question' and 'answer', but it has ['question', 'solution']"
        in refusal(taken)
    )
    check_external_objects(load([*taken, "data.train.answer_key=solution"]).config)
    path.write_bytes(b"PAR1")
    assert f"{path} is not a readable parquet file" in refusal(taken)


def test_a_file_without_rows_is_refused(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n")
    assert (
        refusal(there)
        == f"data.train.paths names {tmp_path}/train.jsonl, which have no rows: give files with rows."
    )


def test_chat_messages_without_a_template_are_refused(there: list[str], tmp_path: Path) -> None:
    row = {"question": [{"role": "user", "content": "1+1?"}], "answer": "2"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    assert refusal(there).startswith(
        "data.train has chat messages, but the tokenizer has no chat template: set data.chat_template"
    )
    check_external_objects(load([*there, "data.chat_template=x"]).config)
    (tmp_path / "model" / "chat_template.jinja").write_text("x")
    check_external_objects(load(there).config)


def test_string_prompts_as_messages_need_a_template(there: list[str]) -> None:
    taken = [*there, "data.string_prompts=user_message"]
    assert refusal(taken).startswith(
        "data.string_prompts is user_message, but the tokenizer has no chat template"
    )


def test_a_route_without_a_teacher_is_refused(there: list[str], tmp_path: Path) -> None:
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
        ("[]", "config.json is a list, but must be a JSON object"),
        (
            '{"model_type": "qwen0"}',
            "actor.engine.model.path: model_type is 'qwen0', which the installed transformers does not know",
        ),
    ],
)
def test_config_of_a_model_that_cannot_be_loaded_is_refused(
    there: list[str], tmp_path: Path, content: str, sentence: str
) -> None:
    (tmp_path / "model" / "config.json").write_text(content)
    assert sentence in refusal(there)


def test_a_model_type_with_code_of_its_own_is_accepted(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}'
    )
    assert "model_type is 'own'" in refusal(there)
    check_external_objects(load([*there, "actor.engine.model.trust_remote_code=true"]).config)


def test_unknown_architecture_of_a_model_from_scratch_is_refused() -> None:
    text = refusal(["experiment=quickstart", "actor.engine.model.architecture.model_type=qwen0"])
    assert text.startswith(
        "actor.engine.model.architecture.model_type is 'qwen0', which the installed transformers does not know"
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


def test_adapter_to_go_on_from_that_is_not_there_is_refused(
    there: list[str], tmp_path: Path
) -> None:
    text = refusal([*there, f"actor.engine.lora.path={tmp_path}"])
    assert text.startswith(
        f"actor.engine.lora.path is {tmp_path}, but there is no PEFT adapter in that folder"
    )


def test_run_folder_that_cannot_be_made_is_refused(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal([*there, f"run.dir={tmp_path}/file/run"]).startswith(
        f"run.dir is {tmp_path}/file/run, but {tmp_path}/file is a file"
    )


def interpreter(folder: Path, *, says: str, status: int = 0) -> str:
    """Write a program that answers as a Python with these packages would."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("packages", "sentence"),
    [
        ({}, "has no temper-trainer and no temper-engine-api: run"),
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
def test_packages_of_the_servers_interpreter_are_known_before_the_run(
    there: list[str], tmp_path: Path, packages: dict[str, str], sentence: str | None
) -> None:
    python = interpreter(tmp_path, says=json.dumps(packages))
    config = load([*there, "rollout=vllm", f"runtime.rollout_python={python}"]).config
    if sentence is None:
        check_libraries(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_libraries(config)
    assert sentence in str(caught.value)


def test_an_interpreter_that_fails_is_named(there: list[str], tmp_path: Path) -> None:
    python = interpreter(tmp_path, says="", status=3)
    with pytest.raises(ConfigError, match=r"could not list its packages \(exit status 3\)"):
        check_libraries(load([*there, "rollout=vllm", f"runtime.rollout_python={python}"]).config)


def test_an_interpreter_that_hangs_is_left_to_the_run(
    there: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(external_checks, "_LIST_TIMEOUT_S", 0.2)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    check_libraries(load([*there, "rollout=vllm", f"runtime.rollout_python={program}"]).config)
    assert "did not list its packages within 0.2 s" in caplog.text


def test_the_interpreter_of_this_environment_lists_its_packages() -> None:
    found = external_checks._list_versions(sys.executable)
    assert found is not None
    assert {"temper_trainer", "temper_engine_api", "torch"} <= found.keys()


def test_library_of_a_data_source_is_missed_before_the_run(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load([*there, "data.train.kind=datasets", "data.train.paths=[name]"]).config
    with pytest.raises(ConfigError, match="datasets is not installed"):
        check_libraries(config)
