"""The old FSDP worker classes: roles around the actor and the critic."""

from typing_extensions import deprecated

from temper_engine_fsdp.config import FSDPConfig
from temper_legacy_shim.deprecation import deprecated_class
from temper_legacy_shim.workers.batches.settings import block
from temper_legacy_shim.workers.batches.updates import OldSchedule
from temper_legacy_shim.workers.engine.engine_configs import build_fsdp_config
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic
from temper_legacy_shim.workers.role_workers import (
    Backend,
    PolicyWorker,
    Values,
    ValueWorker,
    WeightsByCall,
)


def _configure_policy(
    config: Values, role: str, is_trained: bool, keeps_old_schedule: bool
) -> FSDPConfig:
    own = block(config, role)
    model = {**block(config, "model"), **(block(own, "model") if role == "ref" else {})}
    if role == "ref":
        model |= {"lora_rank": 0}
    return build_fsdp_config(
        model,
        fsdp=block(own, "fsdp_config"),
        optim=block(own, "optim") if is_trained else None,
        actor={**block(config, "actor"), **own},
        model_type="language_model",
        keeps_old_schedule=keeps_old_schedule,
    )


def _configure_critic(config: Values, keeps_old_schedule: bool) -> FSDPConfig:
    model = block(config, "model")
    return build_fsdp_config(
        model,
        fsdp=block(model, "fsdp_config"),
        optim=block(config, "optim"),
        actor=config,
        model_type="value_model",
        keeps_old_schedule=keeps_old_schedule,
    )


FSDP = Backend(
    engine_name="fsdp",
    schedule=OldSchedule,
    actor=PPOActor,
    critic=PPOCritic,
    configure_policy=_configure_policy,
    configure_critic=_configure_critic,
)


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.fsdp_workers.ActorRolloutRefWorker is deprecated since "
    "temper-legacy-shim 0.2 and will be removed in 0.4: use "
    "temper_trainer.runtime.worker_group.TrainingWorker instead; one for each role, with "
    "model_engine=fsdp; sampling is temper_trainer.rollout.hf_sampler.HfSampler's.",
    category=None,
)
class ActorRolloutRefWorker(PolicyWorker):
    """The old FSDP worker of actor, rollout and reference policy.

    Args:
        config: the old ``actor_rollout_ref`` block: model, actor, rollout, ref.
        role: actor, rollout, ref, actor_rollout or actor_rollout_ref.
        kwargs: ``numerics`` ("legacy" or "temper") and ``engines``, engine configurations by role
            that replace those of the config; other keywords are rejected.
    """

    backend = FSDP

    def __init__(self, config: object, role: str, **kwargs: object) -> None:
        super().__init__(config, role, kwargs)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save the actor's state as a step directory below ``local_path``. Collective."""
        self._save(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Load the last complete step below ``local_path``; collective, deletes no file."""
        self._load(local_path, hdfs_path, del_local_after_load)


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.fsdp_workers.AsyncActorRolloutRefWorker is deprecated since "
    "temper-legacy-shim 0.2 and will "
    "be removed in 0.4: use temper_trainer.runtime.worker_group.TrainingWorker instead; "
    "temper_trainer.weight_sync.publisher.Publisher moves weights to the sampler.",
    category=None,
)
class AsyncActorRolloutRefWorker(WeightsByCall, ActorRolloutRefWorker):
    """The old worker whose sampler is given weights by call."""


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.fsdp_workers.CriticWorker is deprecated since temper-legacy-shim "
    "0.2 and will be removed in 0.4: use temper_trainer.runtime.worker_group.TrainingWorker "
    "instead; with model_engine=fsdp and model_type value_model.",
    category=None,
)
class CriticWorker(ValueWorker):
    """The old critic worker of FSDP; config is the ``critic`` block."""

    backend = FSDP

    def __init__(self, config: object, **kwargs: object) -> None:
        super().__init__(config, kwargs)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save the critic's state as a step directory below ``local_path``. Collective."""
        self._save(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
    ) -> None:
        """Load the last complete step below ``local_path``; collective, deletes no file."""
        self._load(local_path, hdfs_path, del_local_after_load)
