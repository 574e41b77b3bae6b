"""Old base classes, to subclass or to ask ``isinstance``; they compute nothing."""

from abc import ABC, abstractmethod
from typing import NoReturn

from torch import Tensor

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.workers import megatron_workers
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic


class BasePPOActor(ABC):
    """Methods of every old actor."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def compute_log_prob(self, data: DataProto) -> Tensor | dict[str, Tensor]:
        """Return the log-probs of the responses under the current policy."""

    @abstractmethod
    def update_policy(self, data: DataProto) -> dict[str, object]:
        """Train on the batch; returns metrics."""


class BasePPOCritic(ABC):
    """Methods of every old critic."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def compute_values(self, data: DataProto) -> Tensor:
        """Compute values [B, W] of the states before each response token."""

    @abstractmethod
    def update_critic(self, data: DataProto) -> dict[str, object]:
        """Train on the batch; returns metrics."""


class MegatronWorker(ABC):  # noqa: B024  # a name for isinstance
    """The old Megatron workers' base, as a name alone."""

    def __init__(self, *_: object, **__: object) -> None:
        _refuse()

    def __init_subclass__(cls, **_: object) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError(
        "MegatronWorker only set up Megatron's groups and configuration, which engines do "
        "themselves, and stands for isinstance alone: subclass ActorRolloutRefWorker or "
        "CriticWorker of temper_legacy_shim.workers.megatron_workers, or drive a "
        "temper_engine_megatron MegatronEngine."
    )


BasePPOActor.register(PPOActor)
BasePPOCritic.register(PPOCritic)
for _worker in (megatron_workers.ActorRolloutRefWorker, megatron_workers.CriticWorker):
    MegatronWorker.register(_worker)
