import json
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load
from temper_trainer.config_loading.outside import check_libraries, check_outside
from temper_trainer.environment.sandbox import open_sandbox


@pytest.fixture
def there(tmp_path: Path) -> list[str]:
    """Overrides that name a data file and a model directory which exist."""
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return [f"data.train.paths=[{tmp_path}/train.jsonl]", f"actor.engine.model.path={tmp_path}/model"]


def refusal(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_outside(load(overrides).config)
    return str(caught.value)


def test_what_is_there_is_accepted(there: list[str]) -> None:
    check_outside(load(there).config)


def test_missing_data_file_is_named(there: list[str]) -> None:
    assert refusal([*there, "data.eval.paths=[gone.jsonl]"]).startswith("data.eval.paths names gone.jsonl, which is no file here (")


def test_missing_file_of_tools_is_named(there: list[str], tmp_path: Path) -> None:
    assert refusal([*there, "data.tools_path=tools.yaml"]).startswith("data.tools_path is tools.yaml, which is no file here (")
    (tmp_path / "tools.yaml").write_text("[]\n")
    check_outside(load([*there, f"data.tools_path={tmp_path}/tools.yaml"]).config)


def test_addresses_with_a_scheme_are_left_to_the_run(there: list[str]) -> None:
    check_outside(load([*there, "data.eval.paths=['s3://bucket/test.jsonl']"]).config)


def test_directory_without_a_model_is_named(there: list[str], tmp_path: Path) -> None:
    text = refusal([*there, f"actor.engine.model.path={tmp_path}"])
    assert text.startswith(f"actor.engine.model.path is {tmp_path}, but there is no Hugging Face model in that folder (no config.json)")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (
            {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vision_config": {"depth": 32}},
            "vision_config",
        ),
        ({"model_type": "qwen2_vl"}, "model_type qwen2_vl"),
        ({"architectures": ["LlavaForCausalLM"]}, "LlavaForCausalLM"),
        ({"architectures": ["XForConditionalGeneration"], "text_config": {"hidden_size": 8}}, "XForConditionalGeneration"),
    ],
)
def test_a_model_that_sees_is_refused_before_the_run(there: list[str], tmp_path: Path, fields: dict[str, object], part: str) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    assert refusal(there) == (
        f"actor.engine.model.path is {tmp_path}/model, whose config.json says {part}: a model of images, video or sound, which no engine "
        "trains. Give the folder of a text model."
    )


@pytest.mark.parametrize("fields", [{"model_type": "gemma3_text", "vision_config": None}, {"architectures": ["DeepseekV3ForCausalLM"]}, []])
def test_a_model_that_only_reads_is_accepted(there: list[str], tmp_path: Path, fields: object) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    check_outside(load(there).config)


def test_model_from_scratch_without_a_tokenizer_is_told_how_to_train_one() -> None:
    text = refusal(["experiment=quickstart", "data.tokenizer.kind=pretrained"])
    assert text.startswith("data.tokenizer.kind is pretrained, but neither data.tokenizer.path nor actor.engine.model.path is set")


def test_unknown_reward_is_refused_before_the_run(there: list[str]) -> None:
    assert "reward.function is 'gsm8k_stric', which is no registered reward: did you mean" in refusal(
        [*there, "reward.function=gsm8k_stric"]
    )


def test_sft_asks_for_no_reward(there: list[str]) -> None:
    check_outside(load([*there, "task=sft"]).config)


def test_folder_that_holds_a_run_is_refused_before_the_run(there: list[str], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    taken = [*there, f"run.dir={tmp_path}"]
    assert refusal(taken) == f"run.dir {tmp_path} already holds a run: go on with run.resume=auto, or choose another run.dir."
    check_outside(load([*taken, "run.resume=auto"]).config)


def test_misspelt_resume_is_told_what_there_is(there: list[str], tmp_path: Path) -> None:
    assert refusal([*there, "run.resume=atuo"]).startswith("run.resume is atuo, but must be never, auto, or the path of a step directory")
    check_outside(load([*there, f"run.resume={tmp_path}"]).config)


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_tracker_that_is_not_installed_is_named(there: list[str], monkeypatch: pytest.MonkeyPatch, tracker: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = f"run.trackers names {tracker}, which is not installed: pip install 'temper-trainer[{tracker}]'"
    assert refusal([*there, f"run.trackers=[jsonl,{tracker}]"]).startswith(expected)


def test_prometheus_that_is_not_installed_is_named(there: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal([*there, "run.prometheus_port=9464"]).startswith("run.prometheus_port is set, but prometheus_client is not installed")


def test_a_port_in_use_is_refused_before_the_run(there: list[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        expected = f"run.prometheus_port is {port}, which can't be opened on run.prometheus_address 127.0.0.1: Address already in use."
        assert expected in refusal([*there, f"run.prometheus_port={port}"])


def test_library_of_an_extra_is_missed_before_the_run_and_not_by_a_check(there: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for setting, sentence in {
        "runtime.kind=ray": "runtime.kind is ray, but Ray is not installed: pip install 'temper-trainer[ray]', or use inline.",
        "rollout=vllm": "rollout.sampler is vllm, but vLLM is not installed here: pip install 'temper-trainer[vllm]', or name",
        "actor.engine.lora.rank=4 actor.engine.lora.alpha=8": (
            "actor.engine.lora is on, but peft is not installed: pip install 'temper-engine-fsdp[lora]'."
        ),
    }.items():
        config = load([*there, *setting.split()]).config
        check_outside(config)
        with pytest.raises(ConfigError) as caught:
            check_libraries(config)
        assert str(caught.value).startswith(sentence)
    check_libraries(load([*there, "rollout=vllm", f"runtime.rollout_python={sys.executable}"]).config)


@pytest.mark.parametrize("asks", ["rollout=vllm", "+teachers.t.backend=vllm"])
def test_interpreter_of_the_servers_that_is_not_there_is_missed_before_the_run(there: list[str], tmp_path: Path, asks: str) -> None:
    taught = [f"+teachers.t.engine.model.path={tmp_path}/model"] if "teachers" in asks else []
    config = load([*there, asks, *taught, "runtime.rollout_python=/nowhere/python"]).config
    check_outside(config)
    with pytest.raises(ConfigError, match=r"runtime\.rollout_python is /nowhere/python, but nothing that can be run lies there"):
        check_libraries(config)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="needs an environment without vLLM")
def test_folder_with_the_name_of_a_library_is_not_that_library(there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("vllm") is not None
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        check_libraries(load([*there, "rollout=vllm"]).config)


def test_environment_that_is_not_there_is_refused_before_the_run(there: list[str]) -> None:
    assert "environment.name is 'calculater', but must be calculator or python, or an import path" in refusal(
        [*there, "+environment.name=calculater"]
    )
    assert "environment.name names 'Missing' in fractions" in refusal([*there, "+environment.name=fractions:Missing"])
    assert "environment.name is json:loads, which is no class there" in refusal([*there, "+environment.name=json:loads"])
    check_outside(load([*there, "+environment.name=fractions:Fraction"]).config)


def test_python_tool_without_its_sandbox_is_refused_before_the_run(there: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "the program bwrap is not installed" in refusal([*there, "+environment.name=python"])
    check_outside(load([*there, "+environment.name=python", "environment.sandbox=none"]).config)


def test_home_directory_is_found_in_paths_and_nowhere_else(there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = [
        "data.train.paths=['~/train.jsonl']",
        "actor.engine.model.path='~/model'",
        "run.dir='~/run'",
        "data.prompt_template='~/{prompt}'",
    ]
    config = load(own).config
    check_outside(config)
    assert config.run.dir == f"{tmp_path}/run"
    assert config.data.train.paths == (f"{tmp_path}/train.jsonl",)
    assert config.data.prompt_template == "~/{prompt}"


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ('{"question": "a"}\n{"question": "b"}\n{"question": \n', "train.jsonl:3 is not a line of JSON"),
        ('{"problem": "a", "answer": "b"}\n', "prompt_key is question, but"),
        ('["a"]\n', "train.jsonl:1 is a list, but each line must be a JSON object"),
    ],
)
def test_broken_row_is_refused_before_the_run(there: list[str], tmp_path: Path, rows: str, sentence: str) -> None:
    (tmp_path / "train.jsonl").write_text(rows)
    assert sentence in refusal(there)


def test_name_on_the_hub_is_told_how_to_download_it(there: list[str]) -> None:
    text = refusal([*there, "actor.engine.model.path=Qwen/Qwen2.5-0.5B"])
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B" in text


def test_weights_that_are_cut_off_are_named(there: list[str], tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    weights.write_bytes(whole)
    check_outside(load(there).config)
    for size in (0, 20, len(whole) - 1):
        weights.write_bytes(whole[:size])
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
