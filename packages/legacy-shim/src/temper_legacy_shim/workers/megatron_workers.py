"""The old Megatron worker classes: their names and signatures, and one clear sentence until engine-megatron can carry them on."""

from typing import NoReturn

from temper_engine_api.errors import CapabilityError
from temper_legacy_shim.deprecation import deprecated_class

_REPLACEMENT = "temper_trainer.runtime.worker:TrainingWorker"
_HOW = "with model_engine=megatron, once your release of temper-engine-megatron offers it"


def _refuse(name: str) -> NoReturn:
    raise CapabilityError(
        f"{name} is not alive in this release: the deprecated workers run on FSDP alone. Use the FSDP class of the same name, or run "
        "`temper-train model_engine=megatron` where temper-engine-megatron is installed."
    )


@deprecated_class(since="0.1", removed_in="0.3", instead=_REPLACEMENT, how=_HOW)
class ActorRolloutRefWorker:
    """The old Megatron worker of actor, rollout and reference policy."""

    def __init__(self, config: object, role: str, **kwargs: object) -> None:
        _refuse("megatron_workers.ActorRolloutRefWorker")


@deprecated_class(since="0.1", removed_in="0.3", instead=_REPLACEMENT, how=_HOW)
class AsyncActorRolloutRefWorker(ActorRolloutRefWorker):
    """The same with weights by call."""


@deprecated_class(since="0.1", removed_in="0.3", instead=_REPLACEMENT, how=_HOW)
class CriticWorker:
    """The old Megatron worker of the critic."""

    def __init__(self, config: object) -> None:
        _refuse("megatron_workers.CriticWorker")


@deprecated_class(since="0.1", removed_in="0.3", instead=_REPLACEMENT, how=_HOW)
class MegatronPPOActor:
    """The old Megatron actor."""

    def __init__(
        self,
        config: object,
        model_config: object,
        hf_config: object,
        tf_config: object,
        actor_module: object,
        actor_optimizer: object,
        mtp_config: object = None,
    ) -> None:
        _refuse("MegatronPPOActor")


@deprecated_class(since="0.1", removed_in="0.3", instead=_REPLACEMENT, how=_HOW)
class MegatronPPOCritic:
    """The old Megatron critic."""

    def __init__(
        self,
        config: object,
        model_config: object,
        hf_config: object,
        tf_config: object,
        critic_module: object,
        critic_optimizer: object,
        critic_optimizer_config: object,
    ) -> None:
        _refuse("MegatronPPOCritic")
