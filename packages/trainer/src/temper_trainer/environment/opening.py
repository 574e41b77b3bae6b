"""From the configuration to the environment of each rollout."""

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.importing import import_named, is_import_path
from temper_trainer.environment.protocol import MakeEnvironment
from temper_trainer.environment.tools import ToolEnvironment, calculator_tool, python_tool

BUILT_IN = ("calculator", "python")


def environment_maker(config: EnvironmentConfig, *, tokenizer: PreTrainedTokenizerBase) -> MakeEnvironment:
    """What makes one environment for each rollout.

    Raises:
        ConfigError: the name is neither built in nor an import path of a class that can be made with its arguments.
    """
    if config.name in BUILT_IN:
        if config.arguments:
            raise ConfigError(f"environment.arguments are set, but the environment {config.name} takes none: remove them.")
        tool = calculator_tool if config.name == "calculator" else python_tool(config)
        return lambda: ToolEnvironment(tool, config, tokenizer)
    if not is_import_path(config.name):
        raise ConfigError(
            f"environment.name is {config.name!r}, but must be {' or '.join(BUILT_IN)}, or an import path package.module:Class of yours."
        )
    found = import_named(config.name, key="environment.name")
    if not isinstance(found, type):
        raise ConfigError(f"environment.name is {config.name}, which is no class there: mend the name.")
    maker: MakeEnvironment = lambda: found(config=config, tokenizer=tokenizer, **config.arguments)  # noqa: E731
    try:
        maker()
    except TypeError as error:
        raise ConfigError(
            f"environment.name {config.name} can't be made with config, tokenizer and environment.arguments "
            f"{dict(config.arguments)}: {error}."
        ) from error
    return maker
