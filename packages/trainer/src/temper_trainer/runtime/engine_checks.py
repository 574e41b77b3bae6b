"""Check engines before the first of them is built.

Some are built late: those of RL only after the warm start, which may take hours. Importing this
module does not import torch.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from temper_engine_api.capabilities import Capability, find_required_capabilities
from temper_engine_api.errors import EngineNotFoundError, TemperError
from temper_engine_api.registry import load_engine_class
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.trainer_config import TrainerConfig

logger = logging.getLogger(__name__)


def iterate_engines(config: TrainerConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Yield the roles' engines by key, and the warm start's if it is another one."""
    for name, role in config.roles.items():
        yield f"{name}.engine", role.engine
    if config.warm_start is not None and not config.warm_start.optimizer.is_adamw:
        yield "warm_start", replace(config.actor.engine, optimizer=config.warm_start.optimizer)


def find_engine_problems(
    engines: Mapping[str, EngineConfig], *, model_engine: str, replays_routing: bool = False
) -> Iterator[str]:
    """Yield why engines could not be built, in the engine's words.

    Settings, model and optimizer are checked with the engine's own code, without weights or process
    groups. Imports torch; changes no random state.

    Args:
        engines: Settings of each engine by their key, such as ``critic.engine``.
        model_engine: Name of the engine class.
        replays_routing: True if the actor replays choices of experts.
    """
    for key, engine in engines.items():
        import torch  # not before: without an engine to check, nothing is imported

        try:
            engine_class = load_engine_class(model_engine)
            # `init_model` begins with this check, too.
            needed = find_required_capabilities(engine)
            if replays_routing and key == "actor.engine":
                needed.add(Capability.ROUTING_REPLAY)
            engine_class(engine).require(*needed)
            # A new LoRA adapter is initialized with random numbers.
            with torch.random.fork_rng(devices=[]):
                engine_class.check_model(engine)
        except EngineNotFoundError as error:
            # Another host of the cluster may have it.
            logger.warning("the model of %s is not checked: %s", key, error)
        except TemperError as error:
            yield f"{key}: {error}"
