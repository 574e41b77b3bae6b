"""What a completion may act in: tools and turns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.import_path import import_object, is_import_path
from temper_trainer.config.ranges import check_range

BUILT_IN_ENVIRONMENTS = ("calculator", "python")
"""Environments that come with the trainer."""
SandboxName = Literal["bubblewrap", "none"]
"""What programs of the environment python run in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Rollouts of several turns: the policy writes, the environment answers, in tokens throughout."""

    name: str = "calculator"
    """calculator, python (programs in `sandbox`), or an import path ``package.module:Class`` of your own Environment."""
    arguments: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: int = 4
    """Completions of one rollout; sampling.max_tokens bounds each."""
    max_tokens: int | None = None
    """Tokens of a rollout after its prompt, answers of the environment included; None is max_turns times sampling.max_tokens plus
    max_observation_tokens between them."""
    max_observation_tokens: int = 256
    """An answer of the environment is cut to this."""
    call_start: str = "<tool>"
    """Text before a tool call; empty takes what stands since the last line break."""
    call_end: str = "</tool>"
    """Text after a tool call; a completion stops there."""
    answer_start: str = "<result>"
    """Text before a tool's answer; may be empty."""
    answer_end: str = "</result>"
    """Text after a tool's answer; may be empty."""
    tool_timeout_s: float = 5.0
    """Longest time of one tool call, after which the answer says so."""
    tool_memory_mib: int = 256
    """python only: memory of one program."""
    sandbox: SandboxName = "bubblewrap"
    """python only: bubblewrap isolates a program from files, network and processes of this machine; none runs it as your user, with limits
    on time, memory and output alone."""
    turn_discount: float = 1.0
    """Credit over turns: advantages of a turn are multiplied by turn_discount ** (turns after it)."""

    def __post_init__(self) -> None:
        if self.name not in BUILT_IN_ENVIRONMENTS and not is_import_path(self.name):
            raise ConfigError(
                f"environment.name is {self.name!r}, but must be {' or '.join(BUILT_IN_ENVIRONMENTS)}, or an import path package.module:Class of yours."
            )
        if self.name in BUILT_IN_ENVIRONMENTS and self.arguments:
            raise ConfigError(
                f"environment.arguments are set, but the environment {self.name} takes none: remove them."
            )
        if self.sandbox != "bubblewrap" and self.name != "python":
            raise ConfigError(
                f"environment.sandbox is {self.sandbox}, but the environment {self.name} runs no programs in it: remove it."
            )
        check_range("environment.max_turns", self.max_turns, at_least=1)
        check_range("environment.max_tokens", self.max_tokens, at_least=1)
        check_range("environment.max_observation_tokens", self.max_observation_tokens, at_least=1)
        check_range("environment.tool_timeout_s", self.tool_timeout_s, above=0)
        check_range("environment.tool_memory_mib", self.tool_memory_mib, at_least=16)
        check_range("environment.turn_discount", self.turn_discount, at_least=0, at_most=1)
        if not self.call_end:
            raise ConfigError(
                "environment.call_end is empty, but a completion stops there for its call: give a text."
            )

    def longest(self, max_completion: int) -> int:
        """Tokens that a rollout may have after its prompt, with completions of at most ``max_completion``."""
        whole = self.max_turns * max_completion + (self.max_turns - 1) * self.max_observation_tokens
        return whole if self.max_tokens is None else min(whole, self.max_tokens)


def load_environment_class(config: EnvironmentConfig) -> type[Any]:
    """The user's class at the import path that is the environment's name.

    Raises:
        ConfigError: the module can't be imported, or holds no such class.
    """
    found = import_object(config.name, key="environment.name")
    if not isinstance(found, type):
        raise ConfigError(
            f"environment.name is {config.name}, which is no class there: mend the name."
        )
    return found
