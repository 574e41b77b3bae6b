"""The deprecated worker classes, on Temper's engines."""

from temper_legacy_shim.errors import explain_missing_extra

try:
    from temper_legacy_shim.workers.fsdp_workers import (
        ActorRolloutRefWorker,
        AsyncActorRolloutRefWorker,
        CriticWorker,
    )
    from temper_legacy_shim.workers.megatron_workers import MegatronPPOActor, MegatronPPOCritic
    from temper_legacy_shim.workers.ppo_actor import DataParallelPPOActor
    from temper_legacy_shim.workers.ppo_critic import DataParallelPPOCritic
except ModuleNotFoundError as error:
    raise explain_missing_extra("workers", "workers", error) from None

__all__ = [
    "ActorRolloutRefWorker",
    "AsyncActorRolloutRefWorker",
    "CriticWorker",
    "DataParallelPPOActor",
    "DataParallelPPOCritic",
    "MegatronPPOActor",
    "MegatronPPOCritic",
]
