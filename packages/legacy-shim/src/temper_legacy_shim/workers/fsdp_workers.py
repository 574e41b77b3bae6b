"""The old FSDP worker classes: roles around ``DataParallelPPOActor`` and ``DataParallelPPOCritic``, alone or as Ray actors."""

import resource
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import ClassVar

import torch

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.specs import EngineConfig
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import deprecated_class
from temper_legacy_shim.workers import checkpoints
from temper_legacy_shim.workers.old_configs import engine_config, per_rank_sizes
from temper_legacy_shim.workers.old_rollout import OldRollout
from temper_legacy_shim.workers.on_engine import Numerics
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic
from temper_legacy_shim.workers.settings import block, known, plain
from temper_legacy_shim.workers.updates import OldSchedule, set_rate

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")


class _Worker:
    """What both kinds share: an engine each, learning rates, checkpoints, and the calls that profile."""

    def _open_engine(self, config: EngineConfig) -> FSDPEngine:
        assert isinstance(config, FSDPConfig)
        engine = FSDPEngine(config)
        engine.init_model()
        return engine

    def start_profile(self, **kwargs: object) -> None:
        """Refused: use torch.profiler around your own calls."""
        raise ConfigError("start_profile() is gone: wrap the call in torch.profiler.profile() instead.")

    def stop_profile(self) -> None:
        """Refused, see start_profile."""
        raise ConfigError("stop_profile() is gone: wrap the call in torch.profiler.profile() instead.")

    def dump_memory_snapshot(self, tag: str = "manual", sub_dir: str | None = None) -> None:
        """Refused: torch.cuda.memory does it."""
        raise ConfigError("dump_memory_snapshot() is gone: call torch.cuda.memory._dump_snapshot(FILE) instead.")


class _Rates:
    """Learning rates of a trained role: the old schedule's with old numerics, else the engine's own."""

    def __init__(self, engine: BaseEngine, *, old: OldSchedule | None) -> None:
        self._engine = engine
        self._old = old

    def begin(self) -> float:
        """The rate of the updates of one call."""
        if self._old is not None:
            set_rate(self._engine, self._old.rate(self._engine.num_schedule_steps))
        return self._engine.current_lr

    def end(self) -> None:
        """One scheduler step a call, skipped updates or not, as before."""
        self._engine.num_schedule_steps += 1


@deprecated_class(
    since="0.1",
    removed_in="0.3",
    instead="temper_trainer.runtime.worker:TrainingWorker",
    how="one for each role, with model_engine=fsdp; sampling is temper_trainer.rollout.hf.HfSampler's",
)
class ActorRolloutRefWorker(_Worker):
    """The old FSDP worker of actor, rollout and reference policy.

    Args:
        config: the old ``actor_rollout_ref`` block: model, actor, rollout, ref.
        role: actor, rollout, ref, actor_rollout or actor_rollout_ref.
        kwargs: ``numerics`` ("legacy" or "temper") and ``engines``, engine configurations by role that replace what the config says; any
            other keyword is refused.
    """

    def __init__(self, config: object, role: str, **kwargs: object) -> None:
        if role not in ROLES:
            raise ConfigError(f"role is {role!r}, but must be one of {', '.join(ROLES)}.")
        self.config = plain(config)
        self.role = role
        self.numerics, self._engines = _options(kwargs)
        self._is_actor, self._is_ref = "actor" in role, role in ("ref", "actor_rollout_ref")
        self._is_rollout = "rollout" in role
        self.actor: PPOActor | None = None
        self.ref_policy: PPOActor | None = None
        self.rollout: OldRollout | None = None

    def init_model(self) -> None:
        """Build what the role needs. Collective."""
        if self._is_actor:
            self._init_actor()
        if self._is_rollout:
            spec = self._engine_config("actor")
            self.rollout = OldRollout(block(self.config, "rollout"), model=spec.model, compute=spec.precision.compute)
            if self.actor is not None:
                self.rollout.take_weights(self.actor.engine)
        has_adapter = self.actor is not None and self.actor.engine.config.lora.rank > 0
        if self._is_ref and not has_adapter:
            self.ref_policy = PPOActor(block(self.config, "ref"), self._open_engine(self._engine_config("ref")))

    def update_actor(self, data: DataProto) -> DataProto:
        """Train on this rank's rows; ``meta_info["metrics"]`` of what is returned holds the old metrics."""
        actor, rates = self._trained()
        lr, begin = rates.begin(), time.perf_counter()
        metrics = actor.update_policy(data.to("cpu"))
        rates.end()
        return DataProto(meta_info={"metrics": {**metrics, **_machine(time.perf_counter() - begin), "actor/lr": lr}})

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """old_log_probs and entropys [B, W]; with ``meta_info["is_lora"]`` ref_log_prob, from the model without its adapter."""
        actor, _ = self._trained()
        is_reference = bool(data.meta_info.pop("is_lora", False))
        asked = self._asked(data, "ref" if is_reference else "rollout")
        with actor.engine.adapter_disabled() if is_reference else nullcontext():
            found = actor.compute_log_prob(asked, calculate_entropy=not is_reference)
        found["ref_log_prob" if is_reference else "old_log_probs"] = found.pop("log_probs")
        return DataProto.from_dict(tensors=found, meta_info={"temperature": asked.meta_info["temperature"]})

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """ref_log_prob [B, W] of the reference policy: its own model, or the actor without its adapter."""
        if self.ref_policy is None:
            if self.actor is None or self.actor.engine.config.lora.rank == 0:
                raise EngineStateError(f"role {self.role!r} has no reference policy: use ref or actor_rollout_ref, and call init_model().")
            data.meta_info["is_lora"] = True
            return self.compute_log_prob(data)
        found = self.ref_policy.compute_log_prob(self._asked(data, "ref"))
        return DataProto.from_dict(tensors={"ref_log_prob": found["log_probs"]})

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response for each row, from the actor's present weights."""
        if self.rollout is None:
            raise EngineStateError(f"role {self.role!r} has no rollout, or init_model() was not called.")
        if self.actor is not None:
            self.rollout.take_weights(self.actor.engine)
        return self.rollout.generate(prompts)

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """The actor's state as a step directory below ``local_path``. Collective."""
        checkpoints.save(self._trained()[0].engine, local_path, hdfs_path, step=global_step, max_to_keep=max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:
        """The last complete step below ``local_path``. Collective; user files are never deleted."""
        checkpoints.load(self._trained()[0].engine, local_path, hdfs_path, delete_download=del_local_after_load)

    async def rollout_mode(self) -> None:
        """The sampler has the actor's weights afterwards."""
        if self.rollout is not None and self.actor is not None:
            self.rollout.take_weights(self.actor.engine)

    async def trainer_mode(self) -> None:
        """Nothing to do: engine and sampler hold weights of their own."""

    def _init_actor(self) -> None:
        engine = self._open_engine(self._engine_config("actor"))
        actor = block(self.config, "actor")
        rollout_n = block(self.config, "rollout").get("n", 1)
        sizes = per_rank_sizes(actor, num_ranks=engine.topology.dp.size, rollout_n=rollout_n, where="actor")
        self.actor = PPOActor(sizes, engine, numerics=self.numerics)
        keeps = self.numerics == "legacy" and "actor" not in self._engines
        self._rates = _Rates(engine, old=known(OldSchedule, block(actor, "optim")) if keeps else None)

    def _engine_config(self, role: str) -> FSDPConfig:
        if role in self._engines:
            return self._engines[role]
        own = block(self.config, role)
        model = {**block(self.config, "model"), **(block(own, "model") if role == "ref" else {})}
        if role == "ref":
            model |= {"lora_rank": 0}
        return engine_config(
            model,
            fsdp=block(own, "fsdp_config"),
            optim=block(own, "optim") if role == "actor" and self._is_actor else None,
            actor={**block(self.config, "actor"), **own},
            model_type="language_model",
            keeps_old_schedule=self.numerics == "legacy",
        )

    def _asked(self, data: DataProto, role: str) -> DataProto:
        """The batch with the settings of a forward pass, from the role's own block."""
        own, rollout = block(self.config, role), block(self.config, "rollout")
        ranks = self._any_engine().topology.dp.size
        size = own.get("log_prob_micro_batch_size_per_gpu")
        total = own.get("log_prob_micro_batch_size")
        settings = {
            "micro_batch_size": total // ranks if isinstance(total, int) else size,
            "max_token_len": own.get("log_prob_max_token_len_per_gpu", 16384),
            "use_dynamic_bsz": bool(own.get("log_prob_use_dynamic_bsz", False)),
            "temperature": rollout.get("temperature", 1.0),
        }
        return DataProto(data.batch, dict(data.non_tensor_batch), {**data.meta_info, **settings})

    def _any_engine(self) -> BaseEngine:
        policy = self.actor or self.ref_policy
        assert policy is not None
        return policy.engine

    def _trained(self) -> tuple[PPOActor, "_Rates"]:
        if self.actor is None:
            raise EngineStateError(f"role {self.role!r} has no actor, or init_model() was not called.")
        return self.actor, self._rates


@deprecated_class(
    since="0.1",
    removed_in="0.3",
    instead="temper_trainer.runtime.worker:TrainingWorker",
    how="temper_trainer.weight_sync.publish.Publisher moves weights to the sampler",
)
class AsyncActorRolloutRefWorker(ActorRolloutRefWorker):
    """The old worker whose sampler is given weights by call."""

    async def update_weights(self, global_steps: int | None = None) -> None:
        """The sampler has the actor's weights afterwards. Collective."""
        await self.rollout_mode()


@deprecated_class(
    since="0.1",
    removed_in="0.3",
    instead="temper_trainer.runtime.worker:CriticWorker",
    how="with model_engine=fsdp and model_type value_model",
)
class CriticWorker(_Worker):
    """The old FSDP worker of the critic; config is the old ``critic`` block, kwargs are ActorRolloutRefWorker's."""

    block_name: ClassVar[str] = "critic"

    def __init__(self, config: object, **kwargs: object) -> None:
        self.config = plain(config)
        self.numerics, self._engines = _options(kwargs)
        self.critic: PPOCritic | None = None

    def init_model(self) -> None:
        """Build the value model. Collective."""
        model = block(self.config, "model")
        spec = self._engines.get("critic") or engine_config(
            model,
            fsdp=block(model, "fsdp_config"),
            optim=block(self.config, "optim"),
            actor=self.config,
            model_type="value_model",
            keeps_old_schedule=self.numerics == "legacy",
        )
        engine = self._open_engine(spec)
        sizes = per_rank_sizes(
            self.config, num_ranks=engine.topology.dp.size, rollout_n=self.config.get("rollout_n", 1), where=self.block_name
        )
        self.critic = PPOCritic(sizes, engine, numerics=self.numerics)
        keeps = self.numerics == "legacy" and not self._engines
        self._rates = _Rates(engine, old=known(OldSchedule, block(self.config, "optim")) if keeps else None)

    def compute_values(self, data: DataProto) -> DataProto:
        """Values [B, W]."""
        critic = self._critic()
        total, ranks = self.config.get("forward_micro_batch_size"), critic.engine.topology.dp.size
        per_rank = self.config.get("forward_micro_batch_size_per_gpu")
        settings = {
            "micro_batch_size": total // ranks if isinstance(total, int) and per_rank is None else per_rank,
            "max_token_len": self.config.get("forward_max_token_len_per_gpu", 32768),
            "use_dynamic_bsz": bool(self.config.get("use_dynamic_bsz", False)),
        }
        asked = DataProto(data.batch, dict(data.non_tensor_batch), {**data.meta_info, **settings})
        return DataProto.from_dict(tensors={"values": critic.compute_values(asked)})

    def update_critic(self, data: DataProto) -> DataProto:
        """Train on this rank's rows; ``meta_info["metrics"]`` of what is returned holds the old metrics."""
        critic = self._critic()
        lr, begin = self._rates.begin(), time.perf_counter()
        metrics = critic.update_critic(data.to("cpu"))
        self._rates.end()
        return DataProto(meta_info={"metrics": {**metrics, **_machine(time.perf_counter() - begin), "critic/lr": lr}})

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """The critic's state as a step directory below ``local_path``. Collective."""
        checkpoints.save(self._critic().engine, local_path, hdfs_path, step=global_step, max_to_keep=max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        """The last complete step below ``local_path``. Collective; user files are never deleted."""
        checkpoints.load(self._critic().engine, local_path, hdfs_path, delete_download=del_local_after_load)

    def _critic(self) -> PPOCritic:
        if self.critic is None:
            raise EngineStateError("the critic has no model: call init_model() before.")
        return self.critic


def _options(kwargs: Mapping[str, object]) -> tuple[Numerics, dict[str, FSDPConfig]]:
    if unknown := kwargs.keys() - {"numerics", "engines"}:
        raise ConfigError(f"keywords {sorted(unknown)} have no effect on this worker: remove them; numerics and engines are taken.")
    numerics = kwargs.get("numerics", "legacy")
    if numerics != "legacy" and numerics != "temper":
        raise ConfigError(f"numerics is {numerics!r}, but must be legacy or temper.")
    engines = kwargs.get("engines") or {}
    if not isinstance(engines, Mapping) or not all(isinstance(config, FSDPConfig) for config in engines.values()):
        raise ConfigError(f"engines must map roles to FSDPConfig, but is {engines!r}.")
    return ("temper" if numerics == "temper" else "legacy"), dict(engines)


def _machine(seconds: float) -> dict[str, float]:
    """Memory and time of an update by the old names; the share of peak speed is left out, since no peak is known here."""
    numbers = {"timing_s/update": seconds, "perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        numbers["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        numbers["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return numbers
