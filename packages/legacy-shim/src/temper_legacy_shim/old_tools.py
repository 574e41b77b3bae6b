"""Tools of the old kind in rollouts of several turns.

Classes that a YAML file names, called as the old agent loop called them.

Translated configurations name ``HermesTools`` in ``environment.name``. The policy writes
``<tool_call>{"name": ..., "arguments": ...} </tool_call>``, where its completion stops; the tool
answers, and the chat template lays the answer behind as a message of the role tool.
"""

import asyncio
import importlib
import json
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import yaml
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.old_rewards import INFO
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.protocol import Observation
from temper_trainer.types import Prompt

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_GIVEN, _ANSWER = "-what-was-said-", "-what-was-answered-"
"""Stand-ins for the two texts between which the chat template's own words are looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFunction:
    name: str
    """Name for the policy's calls."""
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A tool in the form of chat templates, with the old methods."""

    function: ToolFunction
    type: str = "function"

    @classmethod
    def model_validate(cls, content: Mapping[str, object]) -> "ToolSchema":
        """Build a schema from plain values.

        Raises:
            ConfigError: they describe no function.
        """
        function = content.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"{dict(content)!r:.80} is no schema of a tool: it needs a function with a name."
            )
        known = {
            name: function[name]
            for name in ("name", "description", "parameters")
            if function.get(name) is not None
        }
        return cls(function=ToolFunction(**known))

    def model_dump(self, **ignored: object) -> dict[str, object]:
        """Return plain values, regardless of the old options."""
        del ignored
        function = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": dict(self.function.parameters),
        }
        return {"type": self.type, "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResponse:
    text: str | None = None
    """Goes into the message of the role tool."""
    image: list[object] | None = None
    """Refused: images are out of scope."""
    video: list[object] | None = None
    """Refused: video is out of scope."""

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)


class BaseTool:
    """Base class of old tools: overwrite ``execute`` and other methods that a tool needs."""

    def __init__(self, config: Mapping[str, object], tool_schema: ToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> ToolSchema:
        """Return the schema, where the file has none."""
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: object
    ) -> tuple[str, ToolResponse]:
        """Begin a call; the id identifies the created object."""
        del kwargs
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, object], **kwargs: object
    ) -> tuple[ToolResponse, float, dict[str, object]]:
        """Answer a call: the answer, a reward, metrics."""
        raise NotImplementedError(
            f"{type(self).__name__} has no execute(), which is what a tool does."
        )

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        """Return a reward of the rollout, which was logged and never trained on."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """End a call."""


class _Response(Protocol):
    """Fields of an answer, of this package or the older one."""

    @property
    def text(self) -> str | None: ...
    @property
    def image(self) -> list[object] | None: ...
    @property
    def video(self) -> list[object] | None: ...


class _Tool(Protocol):
    """Methods of a tool, of this package or the older package's base class."""

    name: str

    async def create(self, **kwargs: object) -> object: ...
    async def execute(
        self, instance_id: str, parameters: dict[str, object], **kwargs: object
    ) -> tuple[str | _Response, float, object]: ...
    async def release(self, instance_id: str, **kwargs: object) -> None: ...


class HermesTools:
    """One rollout with old tools; see ``temper_trainer.environment.protocol.Environment``."""

    def __init__(
        self,
        *,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        max_characters: int | None = None,
        cut: str = "middle",
    ) -> None:
        """Load the tools, once in each process.

        Args:
            config: of the environment.
            tokenizer: the policy's, whose chat template lays out answers.
            path: the old ``tool_config_path``.
            max_characters: an answer is cut to these, the old ``max_tool_response_length``; None
                cuts none.
            cut: left, right or middle, the old ``tool_response_truncate_side``: which part stays
                (middle: both ends).

        Raises:
            ConfigError: a tool cannot be built, or the chat template has no place for answers.
        """
        if cut not in ("left", "right", "middle"):
            raise ConfigError(
                f"environment.arguments.cut is {cut!r}, but must be left, right or middle."
            )
        self._tools = load_tools(path)
        self._before, self._after = _around(tokenizer)
        self._config, self._tokenizer, self._max_characters, self._cut_side = (
            config,
            tokenizer,
            max_characters,
            cut,
        )
        self._given: Mapping[str, object] = {}

    def reset(self, prompt: Prompt) -> None:
        """Store the row's arguments for tools, the old ``extra_info.tools_kwargs``."""
        info = prompt.extra.get(INFO)
        given = info.get("tools_kwargs") if isinstance(info, Mapping) else None
        self._given = given if isinstance(given, Mapping) else {}

    def step(self, tokens: Sequence[int]) -> Observation:
        """Return the tool's answer where the completion holds a call; else the rollout is done."""
        matches = _CALL.search(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        call = None if matches is None else _parsed(matches[1])
        if call is None:
            return Observation(is_done=True)
        answer, is_failed = self._answer(*call)
        shown = self._cut(answer)
        ids: list[int] = self._tokenizer(
            f"{self._before}{shown}{self._after}", add_special_tokens=False
        )["input_ids"]
        counts = {
            "tool/calls": 1.0,
            "tool/failed": float(is_failed),
            "tool/cut_answers": float(shown != answer),
        }
        return Observation(tokens=tuple(ids), metrics=counts)

    def _answer(self, name: str, arguments: object) -> tuple[str, bool]:
        """Return a tool's answer, and whether it failed; an exception is an answer, as before."""
        try:
            tool = self._tools[name]
            waiting = _called(tool, arguments, given=self._given.get(name))
            return _loop_of_tools().run(waiting, timeout_s=self._config.tool_timeout_s), False
        except Exception as error:  # noqa: BLE001  a user's tool may raise anything; the policy reads it, and tool/failed counts it
            return f"Error when executing tool: {str(error) or type(error).__name__}", True

    def _cut(self, answer: str) -> str:
        longest = self._max_characters
        if longest is None or len(answer) <= longest:
            return answer
        if self._cut_side == "left":
            return answer[:longest] + "...(truncated)"
        if self._cut_side == "right":
            return "(truncated)..." + answer[-longest:]
        half = longest // 2
        return answer[:half] + "...(truncated)..." + answer[len(answer) - half :]


async def _called(tool: _Tool, arguments: object, *, given: object) -> str:
    """Run a tool call; 0.6 and later pass the row's arguments as ``create_kwargs``."""
    kwargs = given.get("create_kwargs") if isinstance(given, Mapping) else None
    kwargs = dict(kwargs) if isinstance(kwargs, Mapping) else {}
    created = await tool.create(**{**kwargs, "create_kwargs": kwargs})
    instance = str(created[0] if isinstance(created, tuple) else created)
    try:
        if not isinstance(arguments, dict):
            raise TypeError(f"arguments are {arguments!r:.80}, not an object")
        answer, _, _ = await tool.execute(instance, arguments)
    finally:
        await tool.release(instance)
    return answer if isinstance(answer, str) else _text(answer)


def _text(answer: _Response) -> str:
    if answer.image or answer.video:
        raise ValueError("the tool answered with an image or a video, which is out of scope")
    return answer.text or ""


def _parsed(call: str) -> tuple[str, object] | None:
    """Name and arguments; None if it is no call, which ended the old rollout too."""
    try:
        content = json.loads(call)
    except ValueError:
        return None
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("name"), str)
        or "arguments" not in content
    ):
        return None
    return content["name"], content["arguments"]


@cache
def load_tools(path: str) -> Mapping[str, _Tool]:
    """Return the tools of an old file by name.

    Raises:
        ConfigError: an entry cannot be built; the message shows the entry.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"environment.arguments.path is {path!r}, which can't be read as YAML: {error}"
        ) from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"environment.arguments.path is {path!r}, which holds no `tools`: give the old "
            "tool_config_path."
        )
    matches = [_made(entry, path=path) for entry in entries]
    return {tool.name: tool for tool in matches}


def _made(entry: object, *, path: str) -> _Tool:
    """Build one tool of a tool_config_path, which imports and calls the user's class."""
    name = entry.get("class_name") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(name, str):
        raise ConfigError(
            f"{path}: {entry!r:.80} has no class_name: give the tool's class, package.module.Class."
        )
    config = entry.get("config") or {}
    if config.get("type", "native") != "native":
        raise ConfigError(
            f"{path}: {name} is a tool of type {config['type']}, but only native ones run here: "
            "write a native one that asks it."
        )
    schema = entry.get("tool_schema")
    module, _, attribute = name.rpartition(".")
    try:
        cls = vars(importlib.import_module(module))[attribute]
    except (ImportError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path}: {name} can't be imported ({error}): put its folder on PYTHONPATH. A copy of "
            "it may derive from "
            "temper_legacy_shim.old_tools.BaseTool where it took the older package's."
        ) from error
    tool: _Tool = cls(
        config=config, tool_schema=None if schema is None else ToolSchema.model_validate(schema)
    )
    return tool


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the template's text before and after a tool's answer."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _GIVEN},
        {"role": "tool", "content": _ANSWER},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes
        raise ConfigError(
            f"the chat template takes no message of the role tool ({error}): choose a model whose "
            "template does."
        ) from error
    before, stated, rest = str(text).partition(_GIVEN)
    between, answered, after = rest.partition(_ANSWER)
    if not before or not stated or not answered:
        raise ConfigError(
            "the chat template leaves out what an assistant or a tool said: choose a model whose "
            "template shows both."
        )
    return between, after


class _ToolLoop:
    """The event loop for all tools of a process, whose calls never run in parallel."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="old-tools", daemon=True).start()

    def run(self, call: Coroutine[object, object, str], *, timeout_s: float) -> str:
        """Return the answer.

        Raises:
            TimeoutError: the result did not arrive in time.
        """
        return asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(call, timeout_s), self._loop
        ).result()


@cache
def _loop_of_tools() -> _ToolLoop:
    return _ToolLoop()
