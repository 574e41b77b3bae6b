"""Tools that a policy calls by text: the call is found in the decoded completion, the answer is tokenised alone and laid behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.calculator import CalculationError, calculate
from temper_trainer.environment.protocol import Observation
from temper_trainer.environment.sandbox import Sandbox
from temper_trainer.types import Prompt

Tool = Callable[[str], tuple[str, bool]]
"""From what stands in a call to (answer, whether it failed)."""


@dataclass(slots=True)
class ToolEnvironment:
    """One rollout with one tool; see Environment.

    Text is decoded to read a call, and never tokenised again: the completion's tokens stay as they were sampled.
    """

    tool: Tool
    """Answers a call."""
    config: EnvironmentConfig
    """How calls and answers are written."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    said: str = ""
    """Everything decoded so far, answers included."""

    def reset(self, prompt: Prompt) -> None:
        """Forget what was said."""
        del prompt
        self.said = ""

    def step(self, tokens: Sequence[int]) -> Observation:
        """The tool's answer where the completion ends in a call; else the rollout is done."""
        written = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        call = find_call(self.said + written, written=written, config=self.config)
        if call is None:
            return Observation(is_done=True)
        answer, is_failed = self.tool(call)
        text = f"{self.config.answer_start}{answer}{self.config.answer_end}"
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        is_cut = len(ids) > self.config.max_observation_tokens
        self.said += written + text
        return Observation(
            tokens=tuple(ids[: self.config.max_observation_tokens]),
            metrics={
                "tool/calls": 1.0,
                "tool/failed": float(is_failed),
                "tool/cut_answers": float(is_cut),
            },
        )


def find_call(said: str, *, written: str, config: EnvironmentConfig) -> str | None:
    """What stands in a call that the last completion ends in; None where it ends otherwise.

    Args:
        said: everything after the prompt.
        written: its last part, the completion.
        config: the texts around a call; an empty call_start takes what stands since the last line break.
    """
    if not written.endswith(config.call_end):
        return None
    before = said[: -len(config.call_end)]
    start = before.rfind(config.call_start or "\n")
    if start < 0:
        return before if not config.call_start else None
    return before[start + len(config.call_start or "\n") :]


def run_calculator(expression: str) -> tuple[str, bool]:
    """The value, or why there is none."""
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
