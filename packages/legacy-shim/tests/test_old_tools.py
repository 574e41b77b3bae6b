"""Tools of the old kind as an environment: called as before, answered through the chat template."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("temper_trainer", reason="needs temper-trainer")

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.old_tools import HermesTools, load_tools
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.data.tokenizer import build_tokenizer
from temper_trainer.environment.tool_environment import make_environment_factory
from temper_trainer.types import Prompt

TEMPLATE = (
    "{% for m in messages %}({{ m.role }} {{ m.content }}){% endfor %}{% if add_generation_prompt "
    "%}(assistant {% endif %}"
)
MODULE = """\
import asyncio
from temper_legacy_shim.old_tools import BaseTool, ToolResponse

class Adder(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        self.start = kwargs.get("create_kwargs", {}).get("start", 0)
        return "an id", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        assert instance_id == "an id"
        await asyncio.sleep(parameters.get("wait", 0))
        return ToolResponse(text=str(self.start + sum(parameters["numbers"]))), 1.0, {}

class Older:
    '''As before v0.6: create() returns an id alone, execute() a text.'''
    def __init__(self, config, tool_schema):
        self.name, self.released = tool_schema.function.name, []

    async def create(self, instance_id=None, start=0, **kwargs):
        self.start = start
        return "old id"

    async def execute(self, instance_id, parameters, **kwargs):
        return str(self.start) * 9, 0.0, {}

    async def release(self, instance_id, **kwargs):
        self.released.append(instance_id)
"""
FILE = {
    "tools": [
        {
            "class_name": "tools_of_a_user.Adder",
            "config": {"type": "native"},
            "tool_schema": {"function": {"name": "add"}},
        },
        {
            "class_name": "tools_of_a_user.Older",
            "config": {"type": "native"},
            "tool_schema": {"function": {"name": "older"}},
        },
    ]
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tools_of_a_user.py").write_text(MODULE)
    (tmp_path / "tools.yaml").write_text(json.dumps(FILE))
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path / "tools.yaml")


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    texts = [
        (
            f"{json.dumps(FILE)} <tool_call></tool_call> (tool 5) {{'arguments': [1, 2.5], "
            f"'wait'}} "
            "Error when executing: unknown x T"
        )
    ]
    made = build_tokenizer(
        TokenizerConfig(kind="bpe", vocab_size=300),
        model_path=None,
        texts=texts,
        directory=tmp_path / "tokenizer",
    )
    made.chat_template = TEMPLATE
    return made


def environment(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    timeout_s: float = 60.0,
    **arguments: str | int,
) -> HermesTools:
    config = EnvironmentConfig(
        name="temper_legacy_shim.old_tools:HermesTools",
        arguments={"path": path, **arguments},
        call_start="<tool_call>",
        call_end="</tool_call>",
        tool_timeout_s=timeout_s,
    )
    made = make_environment_factory(config, tokenizer=tokenizer)()
    assert isinstance(made, HermesTools)
    return made


def call(name: str, **arguments: object) -> str:
    return f"so <tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> Sequence[int]:
    result: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return result


def prompt(**kwargs: object) -> Prompt:
    return Prompt(
        prompt_id=0,
        text="?",
        tokens=(1,),
        answer="",
        extra={"extra_info": {"tools_kwargs": kwargs}},
    )


def test_a_call_is_answered_as_the_chat_template_lays_out_a_tools_message(
    tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    made = environment(tokenizer, path)
    made.reset(prompt(add={"create_kwargs": {"start": 10}}))
    result = made.step(tokens_of(tokenizer, call("add", numbers=[1, 2])))
    assert tokenizer.decode(result.tokens) == ")(tool 13)(assistant "
    assert (
        result.is_done,
        result.reward,
        result.metrics["tool/calls"],
        result.metrics["tool/failed"],
    ) == (False, 0.0, 1.0, 0.0)


def test_a_tool_of_before_gets_its_row_by_name_and_is_released(
    tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    made = environment(tokenizer, path, max_characters=4, cut="middle")
    made.reset(prompt(older={"create_kwargs": {"start": 7}}, add=None))
    result = made.step(tokens_of(tokenizer, call("older")))
    assert tokenizer.decode(result.tokens) == ")(tool 77...(truncated)...77)(assistant "
    assert result.metrics["tool/cut_answers"] == 1.0
    assert vars(load_tools(path)["older"])["released"] == ["old id"]


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (call("nobody"), "Error when executing tool: 'nobody'"),
        (call("add", numbers="x"), "Error when executing tool: unsupported operand"),
        (call("add", numbers=[1], wait=30), "Error when executing tool: TimeoutError"),
    ],
)
def test_a_call_that_fails_is_answered_with_its_error_and_counted(
    given: str, answer: str, tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    made = environment(tokenizer, path, timeout_s=0.5)
    made.reset(prompt())
    result = made.step(tokens_of(tokenizer, given))
    assert f"(tool {answer}" in tokenizer.decode(result.tokens)
    assert result.metrics["tool/failed"] == 1.0


@pytest.mark.parametrize(
    "given",
    [
        "no call at all",
        "<tool_call>{'name'</tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>{}",
    ],
)
def test_what_is_no_call_ends_the_rollout(
    given: str, tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    made = environment(tokenizer, path)
    made.reset(prompt())
    assert made.step(tokens_of(tokenizer, given)).is_done


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tools": []}, "holds no `tools`"),
        ({"tools": [{"config": {}}]}, "has no class_name"),
        (
            {
                "tools": [
                    {
                        "class_name": "no_such_module.Tool",
                        "tool_schema": {"function": {"name": "x"}},
                    }
                ]
            },
            "can't be imported",
        ),
        (
            {"tools": [{"class_name": "json.JSONDecoder", "config": {"type": "mcp"}}]},
            "a tool of type mcp",
        ),
    ],
)
def test_a_file_whose_tools_cannot_be_made_is_refused(
    content: object, message: str, tmp_path: Path
) -> None:
    (tmp_path / "other.yaml").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        load_tools(str(tmp_path / "other.yaml"))


def test_a_chat_template_without_tools_is_refused(
    tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="leaves out what an assistant or a tool said"):
        environment(tokenizer, path)
