"""Settings of the environment: tools and turns of a rollout."""

import importlib.util
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from temper_engine_api.errors import ConfigError, format_install
from temper_trainer.settings.names import import_object, is_import_path
from temper_trainer.settings.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    UnitFloat,
)
from temper_trainer.settings.variants import settings

BUILT_IN_ENVIRONMENTS = ("calculator", "python")
"""Environments that the trainer provides."""
ADAPTERS = {
    "agent": "temper_trainer.environment.agent_environment:OpenAiAgent",
    "gymnasium": "temper_trainer.environment.gymnasium_environment:GymnasiumEnvironment",
    "mcp": "temper_trainer.environment.mcp_environment:McpEnvironment",
    "openenv": "temper_trainer.environment.openenv_environment:OpenenvEnvironment",
}
"""Environments that need the extra of the same name, and their classes."""
_LIBRARIES = {"agent": "aiohttp"}
"""Library of an adapter, if it has another name."""
SandboxName = Literal["bubblewrap", "none"]
"""Isolation of the programs that the environment python runs."""


@settings
class EnvironmentConfig:
    """Multi-turn rollouts, in which the environment answers the policy's completions."""

    name: str = "calculator"
    """calculator, python (runs programs in ``sandbox``), agent (runs what uses an OpenAI client),
    gymnasium, mcp, openenv, or the import path ``package.module:Class`` of a custom Environment.
    """
    arguments: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """Keyword arguments of agent, gymnasium, mcp, openenv or a custom class."""
    max_turns: PositiveInt = 4
    """Maximum number of completions per rollout; sampling.max_tokens bounds each of them."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens after the prompt, observations included; None is max_turns *
    sampling.max_tokens + (max_turns - 1) * max_observation_tokens.
    """
    max_observation_tokens: PositiveInt = 256
    """Longer observations of the environment are truncated to this many tokens."""
    call_start: str = "<tool>"
    """Text before a tool call; if empty, the call starts after the last line break."""
    call_end: str = "</tool>"
    """Text after a tool call; it stops the completion."""
    answer_start: str = "<result>"
    """Text before a tool's answer; may be empty."""
    answer_end: str = "</result>"
    """Text after a tool's answer; may be empty."""
    max_concurrent: PositiveInt = 16
    """Maximum number of environments that answer at the same time, each in its own thread, and of
    those that are constructed at the same time. For agents, the maximum number that run at the same
    time, those that wait for the sampler included.
    """
    max_open: PositiveInt | None = None
    """Maximum number of environments that are open at the same time, from the constructor to
    ``close``, for those that hold a container or a session; None is no limit. Others wait.
    """
    step_timeout_s: PositiveFloat | None = None
    """Maximum time in seconds of an environment's answer, or of an agent between its requests,
    after which the rollout has failed; None waits without limit.
    """
    max_retries: NonNegativeInt = 0
    """Start a rollout whose environment failed again, with the same seed, up to this often."""
    max_failure_fraction: UnitFloat = 0.0
    """Stop the run if a larger fraction of a step's rollouts fails, because of their environments
    or because the sampler refuses a request; up to it, they are counted and left out. In [0, 1]; 0
    stops at the first.
    """
    tool_timeout_s: PositiveFloat = 5.0
    """Maximum time in seconds of a tool call; the answer then reports the timeout."""
    tool_memory_mib: Annotated[int, Range(at_least=16)] = 256
    """python only: memory limit of a program in MiB."""
    sandbox: SandboxName = "bubblewrap"
    """python only. bubblewrap isolates programs from files, network and processes of the host; none
    runs them as your user, limited only in time, memory and output.
    """
    turn_discount: UnitFloat = 1.0
    """Multiply the advantages of a turn by turn_discount ** (number of later turns); in [0, 1]."""

    def __post_init__(self) -> None:
        names = (*BUILT_IN_ENVIRONMENTS, *ADAPTERS)
        if self.name not in names and not is_import_path(self.name):
            raise ConfigError(
                f"environment.name is {self.name!r}, but must be {' or '.join(names)}, or the "
                "import path package.module:Class of a custom environment."
            )
        if self.name in BUILT_IN_ENVIRONMENTS and self.arguments:
            raise ConfigError(
                f"environment.arguments are set, but the built-in environment {self.name} takes "
                "none: remove them."
            )
        if self.name == "agent":
            _check_agent(self.arguments)
            if not self.call_start:
                raise ConfigError(
                    "environment.call_start is empty, but calls of an agent's tools are found by "
                    "the text before them: set it to that of the chat template."
                )
        if self.sandbox != "bubblewrap" and self.name != "python":
            raise ConfigError(
                f"environment.sandbox is {self.sandbox}, but only the environment python uses it, "
                f"not {self.name}: remove it."
            )
        if not self.call_end:
            raise ConfigError(
                "environment.call_end is empty, but a completion must stop at it after a tool "
                "call: set a text."
            )

    def compute_max_rollout_tokens(self, max_completion: int) -> int:
        """Return the maximum number of tokens after a prompt, given the maximum per completion."""
        unlimited = (
            self.max_turns * max_completion + (self.max_turns - 1) * self.max_observation_tokens
        )
        return unlimited if self.max_tokens is None else min(unlimited, self.max_tokens)


def _check_agent(arguments: Mapping[str, object]) -> None:
    """Raise unless the arguments name either a command or a function."""
    given = [name for name in ("command", "function") if arguments.get(name) is not None]
    if len(given) != 1 or not isinstance(arguments[given[0]], str):
        raise ConfigError(
            f"environment.name is agent, but environment.arguments are {dict(arguments)}: set "
            "either command, which starts the agent, or function, the import path of a function "
            "that runs it."
        )
    if given == ["function"] and arguments.get("variables"):
        raise ConfigError(
            "environment.arguments.variables has no effect with a function, which runs in the "
            "run's own process: remove it."
        )


def load_environment_class(config: EnvironmentConfig) -> type[Any]:
    """Import the environment class that ``config.name`` refers to.

    Raises:
        ConfigError: If the module cannot be imported, has no such class, or needs an extra.
    """
    library = _LIBRARIES.get(config.name, config.name)
    if config.name in ADAPTERS and importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"environment.name is {config.name}, which needs the {library} library: run "
            f"{format_install(f'temper-trainer[{config.name}]')}."
        )
    loaded = import_object(ADAPTERS.get(config.name, config.name), key="environment.name")
    if not isinstance(loaded, type):
        raise ConfigError(
            f"environment.name is {config.name}, which is not a class: correct the name."
        )
    return loaded
