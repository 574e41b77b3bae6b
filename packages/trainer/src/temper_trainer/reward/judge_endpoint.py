"""A judge's API key, and checks for its endpoint before a run starts."""

import importlib.util
import logging
import os

from temper_engine_api.errors import ConfigError, format_install
from temper_trainer.config.judge import JudgeConfig
from temper_trainer.redaction import redact_secrets, register_secrets

logger = logging.getLogger(__name__)

NO_KEY = "EMPTY"
"""Sent to endpoints without a key. Without a value the library would read OPENAI_API_KEY, and send
a key of OpenAI to another endpoint."""
_CHECK_TIMEOUT_S = 5.0
"""Maximum time for an endpoint to list its models."""


def check_judge(config: JudgeConfig, *, name: str) -> None:
    """Raise if a judge's library or key is missing.

    Raises:
        ConfigError: With the setting and the remedy.
    """
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(
            f"reward.judges.{name} needs the openai library: run "
            f"{format_install('temper-trainer[judge]')}."
        )
    read_api_key(config, name=name)


def read_api_key(config: JudgeConfig, *, name: str) -> str | None:
    """Return the API key of the judge ``reward.judges.NAME``, and hide it in all messages.

    Raises:
        ConfigError: If the environment variable is not set or empty.
    """
    if config.api_key_variable is None:
        return None
    key = os.environ.get(config.api_key_variable, "").strip()
    if not key:
        raise ConfigError(
            f"reward.judges.{name}.api_key_variable is {config.api_key_variable}, but this "
            "environment variable is not set: export it with the key, or set another one."
        )
    # Its name need not look like a secret's, which is how `redact_secrets` finds others.
    register_secrets([key])
    return key


def warn_if_unreachable(config: JudgeConfig, *, name: str) -> None:
    """Log a warning if the endpoint of the judge ``reward.judges.NAME`` does not know its model.

    Only a warning, because the endpoint may be started later, or be reachable only from the run's
    machine.
    """
    import openai  # takes 2 s

    client = openai.OpenAI(
        base_url=config.base_url,
        api_key=read_api_key(config, name=name) or NO_KEY,
        timeout=_CHECK_TIMEOUT_S,
        max_retries=0,
    )
    key = f"reward.judges.{name}"
    try:
        with client:
            models = sorted(model.id for model in client.models.list())
    except openai.NotFoundError:
        return  # an endpoint need not list its models
    # A proxy may answer with anything, such as a page in HTML, which the library does not check.
    except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
        logger.warning(
            "%s.base_url %s does not answer (%s): start the endpoint before the run, or correct "
            "the URL.",
            key,
            config.base_url,
            redact_secrets(f"{type(error).__name__}: {error}"),
        )
        return
    if config.model not in models:
        logger.warning(
            "%s.model is %s, but %s lists only %s: correct the name.",
            key,
            config.model,
            config.base_url,
            ", ".join(models[:10]) or "no model",
        )
