"""The old FSDP worker classes.

They are the roles around ``DataParallelPPOActor`` and ``DataParallelPPOCritic``, standalone or as
Ray actors.
"""

from torch import Tensor
from typing_extensions import deprecated

from temper_engine_api.engine import BaseEngine
from temper_engine_api.specs import EngineConfig
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import deprecated_class
from temper_legacy_shim.workers.engine_configs import build_fsdp_config
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic
from temper_legacy_shim.workers.role_workers import (
    OldRates,
    PolicyWorker,
    Values,
    ValueWorker,
    WeightsByCall,
)
from temper_legacy_shim.workers.settings import block, known
from temper_legacy_shim.workers.updates import OldSchedule


@deprecated_class
@deprecated(
    "temper_legacy_shim.workers.fsdp_workers.ActorRolloutRefWorker is deprecated since "
    "temper-legacy-shim 0.2 and will be "
    "removed in 0.4: use temper_trainer.runtime.worker_group.TrainingWorker instead; one for each "
    "role, with model_engine=fsdp; "
    "sampling is temper_trainer.rollout.hf_sampler.HfSampler's.",
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

    engine_name = "fsdp"

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
        """Load the last complete step below ``local_path``.

        Collective; user files are never deleted.
        """
        self._load(local_path, hdfs_path, del_local_after_load)

    def _old_rates(self, optim: Values) -> OldRates:
        rates: OldSchedule = known(OldSchedule, optim)
        return rates

    def _new_policy(self, sizes: Values, engine: BaseEngine) -> PPOActor:
        return PPOActor(sizes, engine, numerics=self.numerics)

    def _update(self, actor: PPOActor, data: DataProto) -> dict[str, object]:
        return actor.update_policy(data)

    def _answers(
        self, policy: PPOActor, data: DataProto, *, calculate_entropy: bool
    ) -> dict[str, Tensor]:
        return policy.compute_log_prob(data, calculate_entropy=calculate_entropy)

    def _engine_config(self, role: str) -> EngineConfig:
        if role in self._engines:
            return self._engines[role]
        own = block(self.config, role)
        model = {**block(self.config, "model"), **(block(own, "model") if role == "ref" else {})}
        if role == "ref":
            model |= {"lora_rank": 0}
        return build_fsdp_config(
            model,
            fsdp=block(own, "fsdp_config"),
            optim=block(own, "optim") if role == "actor" and self._is_actor else None,
            actor={**block(self.config, "actor"), **own},
            model_type="language_model",
            keeps_old_schedule=self.numerics == "legacy",
        )


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
    "0.2 and will be removed in "
    "0.4: use temper_trainer.runtime.worker_group.CriticWorker instead; with model_engine=fsdp and "
    "model_type value_model.",
    category=None,
)
class CriticWorker(ValueWorker):
    """The old FSDP worker of the critic.

    Config is the old ``critic`` block, kwargs are ActorRolloutRefWorker's.
    """

    engine_name = "fsdp"

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
        """Load the last complete step below ``local_path``.

        Collective; user files are never deleted.
        """
        self._load(local_path, hdfs_path, del_local_after_load)

    def _old_rates(self, optim: Values) -> OldRates:
        rates: OldSchedule = known(OldSchedule, optim)
        return rates

    def _new_critic(self, sizes: Values, engine: BaseEngine) -> PPOCritic:
        return PPOCritic(sizes, engine, numerics=self.numerics)

    def _update(self, critic: PPOCritic, data: DataProto) -> dict[str, object]:
        return critic.update_critic(data)

    def _forward_sizes(self, num_ranks: int) -> dict[str, object]:
        total = self.config.get("forward_micro_batch_size")
        per_rank = self.config.get("forward_micro_batch_size_per_gpu")
        return {
            "micro_batch_size": total // num_ranks
            if isinstance(total, int) and per_rank is None
            else per_rank,
            "max_token_len": self.config.get("forward_max_token_len_per_gpu", 32768),
        }

    def _engine_config(self) -> EngineConfig:
        model = block(self.config, "model")
        return build_fsdp_config(
            model,
            fsdp=block(model, "fsdp_config"),
            optim=block(self.config, "optim"),
            actor=self.config,
            model_type="value_model",
            keeps_old_schedule=self.numerics == "legacy",
        )
