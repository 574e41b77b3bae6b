"""From the configuration to the environment of each rollout."""

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.environment import BUILT_IN, EnvironmentConfig, environment_class
from temper_trainer.environment.protocol import MakeEnvironment
from temper_trainer.environment.sandbox import open_sandbox
from temper_trainer.environment.tools import ToolEnvironment, calculator_tool, python_tool


def environment_maker(
    config: EnvironmentConfig, *, tokenizer: PreTrainedTokenizerBase
) -> MakeEnvironment:
    """Return a function that makes the environment of one rollout.

    Raises:
        ConfigError: If the name is no import path of a class that takes `environment.arguments`, or
            the sandbox of the Python tool cannot be started.
    """
    if config.name in BUILT_IN:
        tool = (
            calculator_tool
            if config.name == "calculator"
            else python_tool(config, open_sandbox(config.sandbox))
        )
        return lambda: ToolEnvironment(tool, config, tokenizer)
    found = environment_class(config)
    maker: MakeEnvironment = lambda: found(config=config, tokenizer=tokenizer, **config.arguments)  # noqa: E731
    try:
        maker()
    except TypeError as error:
        raise ConfigError(
            f"environment.name {config.name} can't be made with config, tokenizer and environment.arguments "
            f"{dict(config.arguments)}: {error}."
        ) from error
    return maker
