"""The old Megatron classes: actor, critic, and the roles around them."""

import torch
from torch import nn
from typing_extensions import deprecated

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import CapabilityError
from temper_engine_api.specs import EngineConfig
from temper_legacy_shim.deprecation import deprecated_class
from temper_legacy_shim.workers.batches.settings import block
from temper_legacy_shim.workers.batches.updates import OldMegatronSchedule
from temper_legacy_shim.workers.engine.engine_configs import build_megatron_config
from temper_legacy_shim.workers.engine.on_engine import Numerics
from temper_legacy_shim.workers.megatron_ppo import MegatronActor, MegatronCritic
from temper_legacy_shim.workers.role_workers import (
    Backend,
    PolicyWorker,
    Values,
    ValueWorker,
    WeightsByCall,
)


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.megatron_workers.MegatronPPOActor is deprecated since "
    "temper-legacy-shim 0.2 and will be removed in 0.4: use "
    "temper_engine_megatron.engine.MegatronEngine instead; give it a PolicyObjective with "
    "set_loss_fn() and call forward_backward_batch() and optimizer_step().",
    category=None,
)
class MegatronPPOActor(MegatronActor):
    """The old Megatron actor on an engine; see docs/migration/workers.md.

    Args:
        config: the old actor config, its sizes already divided by the number of data-parallel
            ranks.
        model_config: not used, because the engine has the model.
        hf_config: not read either.
        tf_config: not read either.
        actor_module: an initialized Megatron engine, or a plain Hugging Face model, which an engine
            of the layout in ``config.megatron`` trains, and which gets the weights back. Megatron's
            own chunks are refused.
        actor_optimizer: torch.optim.AdamW over the model's parameters; None with an engine, which
            brings its own, and for a frozen policy.
        mtp_config: refused where it enables anything.
        numerics: legacy computes as the old class did, quirks included; temper as Temper's own
            objective does.
    """

    def __init__(
        self,
        config: object,
        model_config: object,
        hf_config: object,
        tf_config: object,
        actor_module: nn.Module | BaseEngine,
        actor_optimizer: torch.optim.Optimizer | None = None,
        mtp_config: object = None,
        *,
        numerics: Numerics = "legacy",
    ) -> None:
        if mtp_config is not None and vars(mtp_config).get("enable"):
            raise CapabilityError(
                "mtp_config enables multi-token prediction, which no engine trains: pass None."
            )
        super().__init__(config, actor_module, actor_optimizer, numerics=numerics)


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.megatron_workers.MegatronPPOCritic is deprecated since "
    "temper-legacy-shim 0.2 and will be removed in 0.4: use "
    "temper_engine_megatron.engine.MegatronEngine instead; configure it with model_type "
    "value_model, give it a ValueObjective with set_loss_fn(), and call forward_backward_batch().",
    category=None,
)
class MegatronPPOCritic(MegatronCritic):
    """The old Megatron critic; ``critic_optimizer_config`` is not read."""

    def __init__(
        self,
        config: object,
        model_config: object,
        hf_config: object,
        tf_config: object,
        critic_module: nn.Module | BaseEngine,
        critic_optimizer: torch.optim.Optimizer | None = None,
        critic_optimizer_config: object = None,
        *,
        numerics: Numerics = "legacy",
    ) -> None:
        super().__init__(config, critic_module, critic_optimizer, numerics=numerics)


def _configure_policy(
    config: Values, role: str, is_trained: bool, keeps_old_schedule: bool
) -> EngineConfig:
    own = block(config, role)
    model = {**block(config, "model"), **(block(own, "model") if role == "ref" else {})}
    if role == "ref":
        model |= {"lora": {}}
    return build_megatron_config(
        model,
        # The reference policy's layout is the actor's where it says nothing else, and must be
        # where both live in one process.
        megatron={**block(block(config, "actor"), "megatron"), **block(own, "megatron")},
        optim=block(own, "optim") if is_trained else None,
        role={**block(config, "actor"), **own},
        model_type="language_model",
        keeps_old_schedule=keeps_old_schedule,
    )


def _configure_critic(config: Values, keeps_old_schedule: bool) -> EngineConfig:
    return build_megatron_config(
        block(config, "model"),
        megatron=block(config, "megatron"),
        optim=block(config, "optim"),
        role=config,
        model_type="value_model",
        keeps_old_schedule=keeps_old_schedule,
    )


MEGATRON = Backend(
    engine_name="megatron",
    schedule=OldMegatronSchedule,
    actor=MegatronActor,
    critic=MegatronCritic,
    configure_policy=_configure_policy,
    configure_critic=_configure_critic,
)


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.megatron_workers.ActorRolloutRefWorker is deprecated since "
    "temper-legacy-shim 0.2 and will be removed in 0.4: use "
    "temper_trainer.runtime.worker_group.TrainingWorker instead; one for each role, with "
    "model_engine=megatron; sampling is temper_trainer.rollout.hf_sampler.HfSampler's.",
    category=None,
)
class ActorRolloutRefWorker(PolicyWorker):
    """The old Megatron worker of actor, rollout and reference; arguments as for FSDP."""

    backend = MEGATRON

    def __init__(self, config: object, role: str, **kwargs: object) -> None:
        super().__init__(config, role, kwargs)

    def save_checkpoint(
        self,
        checkpoint_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save the actor's state as a step directory below ``checkpoint_path``. Collective."""
        self._save(checkpoint_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        checkpoint_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
    ) -> None:
        """Load the last complete step below ``checkpoint_path``; collective, deletes no file."""
        self._load(checkpoint_path, hdfs_path, del_local_after_load)

    def load_pretrained_model(
        self, checkpoint_path: str, del_local_after_load: bool = True
    ) -> None:
        """Do nothing, as before: ``init_model`` loads the model."""

    def async_calls_finalize_fn_exec(self, blocking: bool = False) -> None:
        """Wait for a save in the background. Collective."""
        self._trained()[0].engine.finish_saving()


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.megatron_workers.AsyncActorRolloutRefWorker is deprecated since "
    "temper-legacy-shim 0.2 and "
    "will be removed in 0.4: use temper_trainer.runtime.worker_group.TrainingWorker instead; "
    "temper_trainer.weight_sync.publisher.Publisher moves weights to the sampler.",
    category=None,
)
class AsyncActorRolloutRefWorker(WeightsByCall, ActorRolloutRefWorker):
    """The old worker whose sampler is given weights by call."""


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.megatron_workers.CriticWorker is deprecated since "
    "temper-legacy-shim 0.2 and will be removed "
    "in 0.4: use temper_trainer.runtime.worker_group.TrainingWorker instead; with "
    "model_engine=megatron and model_type value_model.",
    category=None,
)
class CriticWorker(ValueWorker):
    """The old Megatron worker of the critic; config is the ``critic`` block."""

    backend = MEGATRON

    def __init__(self, config: object, **kwargs: object) -> None:
        super().__init__(config, kwargs)

    def save_checkpoint(
        self,
        checkpoint_path: str,
        hdfs_path: str | None = None,
        global_steps: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save the critic's state as a step directory below ``checkpoint_path``. Collective."""
        self._save(checkpoint_path, hdfs_path, global_steps, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        checkpoint_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
    ) -> None:
        """Load the last complete step below ``checkpoint_path``; collective, deletes no file."""
        self._load(checkpoint_path, hdfs_path, del_local_after_load)
