"""Create the environments that a configuration asks for."""

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.environment import (
    BUILT_IN_ENVIRONMENTS,
    EnvironmentConfig,
    load_environment_class,
)
from temper_trainer.environment.protocol import Environment, EnvironmentFactory
from temper_trainer.environment.sandbox import open_sandbox
from temper_trainer.environment.tool_environment import (
    ToolEnvironment,
    make_python_tool,
    run_calculator,
)


def make_environment_factory(
    config: EnvironmentConfig, *, tokenizer: PreTrainedTokenizerBase
) -> EnvironmentFactory:
    """Return a function that creates the environment of one rollout.

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

    def make() -> Environment:
        environment: Environment = user_class(
            config=config, tokenizer=tokenizer, **config.arguments
        )
        return environment

    try:
        make()
    except TypeError as error:
        raise ConfigError(
            f"{config.name} (environment.name) cannot be created with config, tokenizer and "
            f"environment.arguments = {dict(config.arguments)}: {error}."
        ) from error
    return make
