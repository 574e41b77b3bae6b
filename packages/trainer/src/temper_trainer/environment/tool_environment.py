"""Create environments. The built-in ones have one tool, which the policy calls by writing text.

The call is searched in the decoded completion. Its answer is tokenized and appended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.environment import (
    BUILT_IN_ENVIRONMENTS,
    EnvironmentConfig,
    load_environment_class,
)
from temper_trainer.config.run import LOOPBACK
from temper_trainer.environment.calculator import CalculationError, calculate
from temper_trainer.environment.protocol import Environment, EnvironmentFactory, Observation
from temper_trainer.environment.sandbox import Sandbox, open_sandbox
from temper_trainer.types import Prompt

Tool = Callable[[str], tuple[str, bool]]
"""Takes the text of a call; returns the answer, and True if the call failed."""


@dataclass(slots=True)
class ToolEnvironment:
    """An Environment with one tool.

    Completions are decoded to find calls, but never tokenized again: training uses exactly the
    tokens that were sampled.
    """

    tool: Tool
    config: EnvironmentConfig
    """Markers around calls and answers, and limits."""
    tokenizer: PreTrainedTokenizerBase
    transcript: str = ""
    """Text of all completions and answers so far."""

    def reset(self, prompt: Prompt) -> None:
        """Start an empty transcript."""
        del prompt
        self.transcript = ""

    def step(self, tokens: Sequence[int]) -> Observation:
        """Return the tool's answer if the completion ends with a call, else end the rollout."""
        completion = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        call = find_call(self.transcript + completion, completion=completion, config=self.config)
        if call is None:
            return Observation(is_done=True)
        answer, is_failed = self.tool(call)
        text = f"{self.config.answer_start}{answer}{self.config.answer_end}"
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        is_truncated = len(ids) > self.config.max_observation_tokens
        self.transcript += completion + text
        return Observation(
            tokens=tuple(ids[: self.config.max_observation_tokens]),
            metrics={
                "tool/calls": 1.0,
                "tool/failed": float(is_failed),
                "tool/cut_answers": float(is_truncated),
            },
        )


def find_call(transcript: str, *, completion: str, config: EnvironmentConfig) -> str | None:
    """Return the text of the call that the last completion ends with; None if there is no call.

    Args:
        transcript: Everything after the prompt, including the completion.
        completion: The last completion.
        config: Texts around a call. With an empty call_start, a call is the last line.
    """
    if not completion.endswith(config.call_end):
        return None
    text = transcript[: -len(config.call_end)]
    start = text.rfind(config.call_start or "\n")
    if start < 0:
        return text if not config.call_start else None
    return text[start + len(config.call_start or "\n") :]


def run_calculator(expression: str) -> tuple[str, bool]:
    """Return the value of an expression, or the reason why it has none."""
    try:
        return calculate(expression), False
    except CalculationError as error:
        return f"error: {error}", True


def make_python_tool(config: EnvironmentConfig, sandbox: Sandbox) -> Tool:
    """Return a tool that runs a call as a Python program in the sandbox."""

    def run(code: str) -> tuple[str, bool]:
        result = sandbox.run(
            code, timeout_s=config.tool_timeout_s, memory_mib=config.tool_memory_mib
        )
        if result.is_timeout:
            return f"error: no result within {config.tool_timeout_s:g} s", True
        return result.output, result.is_failed

    return run


def make_environment_factory(
    config: EnvironmentConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    address: str = LOOPBACK,
) -> EnvironmentFactory:
    """Return a function that creates the environment of one rollout.

    Args:
        config: Settings of the environment.
        tokenizer: Tokenizer of the policy.
        chat_template: Chat template of the run; None is that of the tokenizer.
        address: IPv4 address of this host on which the run listens.

    Raises:
        ConfigError: If the name is not the import path of a class that takes
            `environment.arguments`, or the sandbox of the Python tool cannot be started.
    """
    if config.name in BUILT_IN_ENVIRONMENTS:
        tool = (
            run_calculator
            if config.name == "calculator"
            else make_python_tool(config, open_sandbox(config.sandbox))
        )
        return lambda: ToolEnvironment(tool, config, tokenizer)
    user_class = load_environment_class(config)
    if config.name == "agent":
        agents: EnvironmentFactory = user_class.make_factory(
            config=config,
            tokenizer=tokenizer,
            chat_template=chat_template,
            address=address,
            **config.arguments,
        )
        return agents
    # A class whose objects share something, such as a server, provides its own factory.
    make_factory = getattr(user_class, "make_factory", None)
    if make_factory is not None:
        factory: EnvironmentFactory = make_factory(
            config=config, tokenizer=tokenizer, **config.arguments
        )
        return factory

    def make() -> Environment:
        environment: Environment = user_class(
            config=config, tokenizer=tokenizer, **config.arguments
        )
        return environment

    # Create one now, so that wrong arguments are found before the first rollout.
    try:
        make()
    except TypeError as error:
        raise ConfigError(
            f"{config.name} (environment.name) cannot be created with config, tokenizer and "
            f"environment.arguments = {dict(config.arguments)}: {error}."
        ) from error
    return make
