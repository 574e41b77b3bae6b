"""The old workers of both backends: roles around an actor or a critic."""

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.registry import load_engine_class, load_engine_config_class
from temper_engine_api.specs import EngineConfig
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.workers.batches.old_rollout import OldRollout
from temper_legacy_shim.workers.batches.settings import block, known, plain
from temper_legacy_shim.workers.batches.updates import set_rate
from temper_legacy_shim.workers.engine.engine_configs import compute_rank_sizes
from temper_legacy_shim.workers.engine.on_engine import Numerics
from temper_legacy_shim.workers.engine.speed import compute_mfu
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")
Values = Mapping[str, object]


class OldRates(Protocol):
    """Old learning rates as a pure function of completed scheduler steps."""

    def rate(self, step: int) -> float:
        """Return the rate of the updates after this many steps."""


class Rates:
    """Learning rates of a role, by the old schedule or the engine's."""

    def __init__(self, engine: BaseEngine, *, old: OldRates | None) -> None:
        self._engine = engine
        self._old = old

    def begin(self) -> float:
        if self._old is not None:
            set_rate(self._engine, self._old.rate(self._engine.num_schedule_steps))
        return self._engine.current_lr

    def end(self) -> None:
        """Count one scheduler step per call, also for skipped updates, as before."""
        self._engine.num_schedule_steps += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Parts in which the workers of one engine differ from those of the other."""

    engine_name: str
    """Name as in ``model_engine``."""
    schedule: type[OldRates]
    """Reads an old ``optim`` block."""
    actor: type[PPOActor]
    critic: type[PPOCritic]
    configure_policy: Callable[[Values, str, bool, bool], EngineConfig]
    """Build a policy's engine from config, role, is-trained and keeps-old-schedule."""
    configure_critic: Callable[[Values, bool], EngineConfig]
    """Builds the engine of a critic; the flag is true if it keeps the old schedule."""


class RoleWorker:
    """Shared parts of both kinds: engines, learning rates, checkpoints, profiling calls."""

    backend: ClassVar[Backend]

    def __init__(self, config: object, kwargs: Values) -> None:
        self.config = plain(config)
        self.numerics, self._engines = self._options(kwargs)
        self._opened_engines: list[BaseEngine] = []

    def _rates_of(self, engine: BaseEngine, *, optim: Values, role: str) -> Rates:
        keeps = self.numerics == "legacy" and role not in self._engines
        old: OldRates | None = known(self.backend.schedule, optim) if keeps else None
        return Rates(engine, old=old)

    def _open_engine(self, config: EngineConfig) -> BaseEngine:
        engine: BaseEngine = load_engine_class(self.backend.engine_name)(config)
        engine.init_model()
        self._opened_engines.append(engine)
        return engine

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the engines opened so far if the body raises.

        An engine owns the default process group it created. Left open, it would keep the
        caller from creating another group after it has corrected its configuration.
        """
        try:
            yield
        except BaseException:
            # Newest first, because the first engine may own the group that the others use.
            while self._opened_engines:
                self._opened_engines.pop().close()
            raise

    def _options(self, kwargs: Values) -> tuple[Numerics, dict[str, EngineConfig]]:
        if unknown := kwargs.keys() - {"numerics", "engines"}:
            raise ConfigError(
                f"keywords {sorted(unknown)} have no effect on this worker: remove them; numerics "
                "and engines are taken."
            )
        numerics = kwargs.get("numerics", "legacy")
        if numerics != "legacy" and numerics != "temper":
            raise ConfigError(f"numerics is {numerics!r}, but must be legacy or temper.")
        engines = kwargs.get("engines") or {}
        expected = load_engine_config_class(self.backend.engine_name) if engines else EngineConfig
        if not isinstance(engines, Mapping) or not all(
            isinstance(config, expected) for config in engines.values()
        ):
            raise ConfigError(f"engines must map roles to {expected.__name__}, but is {engines!r}.")
        return ("temper" if numerics == "temper" else "legacy"), dict(engines)

    def _machine(
        self, engine: BaseEngine, data: DataProto, *, sizes: Values, name: str, elapsed_s: float
    ) -> dict[str, float]:
        """Return the memory, time and speed of an update by the old names."""
        numbers = {
            "timing_s/update": elapsed_s,
            # Linux counts it in kilobytes.
            "perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        passes = sizes.get("ppo_epochs", 1)
        lengths = data.meta_info.get("global_token_num")
        fraction = compute_mfu(
            engine,
            lengths=lengths,
            passes=passes if isinstance(passes, int) else 1,
            elapsed_s=elapsed_s,
        )
        if fraction is not None:
            numbers[f"perf/mfu/{name}"] = fraction
        if torch.cuda.is_available():
            numbers["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
            numbers["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
        return numbers

    def start_profile(self, **kwargs: object) -> None:
        """Raise an error: use torch.profiler around your own calls."""
        raise ConfigError(
            "start_profile() is gone: wrap the call in torch.profiler.profile() instead."
        )

    def stop_profile(self) -> None:
        """Raise an error; see start_profile."""
        raise ConfigError(
            "stop_profile() is gone: wrap the call in torch.profiler.profile() instead."
        )

    def dump_memory_snapshot(self, tag: str = "manual", sub_dir: str | None = None) -> None:
        """Raise an error: use torch.cuda.memory."""
        raise ConfigError(
            "dump_memory_snapshot() is gone: call torch.cuda.memory._dump_snapshot(FILE) instead."
        )


class PolicyWorker(RoleWorker):
    """Actor, rollout and reference policy; see ``fsdp_workers.ActorRolloutRefWorker``."""

    def __init__(self, config: object, role: str, kwargs: Values) -> None:
        if role not in ROLES:
            raise ConfigError(f"role is {role!r}, but must be one of {', '.join(ROLES)}.")
        super().__init__(config, kwargs)
        self.role = role
        self._is_actor, self._is_ref = "actor" in role, role in ("ref", "actor_rollout_ref")
        self._is_rollout = "rollout" in role
        self.actor: PPOActor | None = None
        self.ref_policy: PPOActor | None = None
        self.rollout: OldRollout | None = None

    def init_model(self) -> None:
        """Build the role's engines and sampler. Collective."""
        with self._closed_on_error():
            if self._is_actor:
                self._init_actor()
            if self._is_rollout:
                spec = self._engine_config("actor")
                self.rollout = OldRollout(
                    block(self.config, "rollout"), model=spec.model, compute=spec.precision.compute
                )
                if self.actor is not None:
                    self.rollout.take_weights(self.actor.engine)
            has_adapter = self.actor is not None and self.actor.engine.config.lora.rank > 0
            if self._is_ref and not has_adapter:
                engine = self._open_engine(self._engine_config("ref"))
                self.ref_policy = self.backend.actor(
                    block(self.config, "ref"), engine, numerics=self.numerics
                )

    def update_actor(self, data: DataProto) -> DataProto:
        """Train on this rank's rows; ``meta_info["metrics"]`` has the old metrics."""
        actor, rates = self._trained()
        lr, begin = rates.begin(), time.perf_counter()
        metrics = actor.update_on_rows(data.to("cpu"))
        rates.end()
        speed = self._machine(
            actor.engine,
            data,
            sizes=block(self.config, "actor"),
            name="actor",
            elapsed_s=time.perf_counter() - begin,
        )
        return DataProto(meta_info={"metrics": {**metrics, **speed, "actor/lr": lr}})

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return old_log_probs and entropys [B, W]; with ``is_lora`` ref_log_prob."""
        actor, _ = self._trained()
        is_reference = bool(data.meta_info.pop("is_lora", False))
        requested = self._requested(data, "ref" if is_reference else "rollout")
        with actor.engine.disable_adapter() if is_reference else nullcontext():
            result = actor.score_rows(requested, calculate_entropy=not is_reference)
        result["ref_log_prob" if is_reference else "old_log_probs"] = result.pop("log_probs")
        return DataProto.from_dict(
            tensors=result, meta_info={"temperature": requested.meta_info["temperature"]}
        )

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ref_log_prob [B, W], of the reference or the actor without adapter."""
        if self.ref_policy is None:
            if self.actor is None or self.actor.engine.config.lora.rank == 0:
                raise EngineStateError(
                    f"role {self.role!r} has no reference policy: use ref or actor_rollout_ref, "
                    "and call init_model()."
                )
            data.meta_info["is_lora"] = True
            return self.compute_log_prob(data)
        result = self.ref_policy.score_rows(self._requested(data, "ref"), calculate_entropy=False)
        return DataProto.from_dict(tensors={"ref_log_prob": result["log_probs"]})

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return one response for each row, from the actor's present weights."""
        if self.rollout is None:
            raise EngineStateError(
                f"role {self.role!r} has no rollout, or init_model() was not called."
            )
        if self.actor is not None:
            self.rollout.take_weights(self.actor.engine)
        return self.rollout.generate(prompts)

    async def rollout_mode(self) -> None:
        """Copy the actor's weights to the sampler."""
        if self.rollout is not None and self.actor is not None:
            self.rollout.take_weights(self.actor.engine)

    async def trainer_mode(self) -> None:
        """Do nothing: engine and sampler have separate weights."""

    def _save(self, folder: str, hdfs_path: str | None, step: int, max_to_keep: int | None) -> None:
        save_step(self._trained()[0].engine, folder, hdfs_path, step=step, max_to_keep=max_to_keep)

    def _load(self, folder: str | None, hdfs_path: str | None, delete_download: bool) -> None:
        load_step(self._trained()[0].engine, folder, hdfs_path, delete_download=delete_download)

    def _init_actor(self) -> None:
        engine = self._open_engine(self._engine_config("actor"))
        actor = block(self.config, "actor")
        rollout_n = block(self.config, "rollout").get("n", 1)
        sizes = compute_rank_sizes(
            actor, num_ranks=engine.topology.dp.size, rollout_n=rollout_n, where="actor"
        )
        self.actor = self.backend.actor(sizes, engine, numerics=self.numerics)
        self._rates = self._rates_of(engine, optim=block(actor, "optim"), role="actor")

    def _engine_config(self, role: str) -> EngineConfig:
        """Return the configuration of the actor's or the reference policy's engine."""
        if role in self._engines:
            return self._engines[role]
        is_trained = role == "actor" and self._is_actor
        return self.backend.configure_policy(
            self.config, role, is_trained, self.numerics == "legacy"
        )

    def _requested(self, data: DataProto, role: str) -> DataProto:
        """Return the batch with the settings of a forward pass, from the role's own block."""
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

    def _trained(self) -> tuple[PPOActor, Rates]:
        if self.actor is None:
            raise EngineStateError(
                f"role {self.role!r} has no actor, or init_model() was not called."
            )
        return self.actor, self._rates


class WeightsByCall(PolicyWorker):
    """The asynchronous classes, whose caller says when the sampler takes weights."""

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Copy the actor's weights to the sampler. Collective."""
        await self.rollout_mode()


class ValueWorker(RoleWorker):
    """The critic; see ``fsdp_workers.CriticWorker``."""

    def __init__(self, config: object, kwargs: Values) -> None:
        super().__init__(config, kwargs)
        self.critic: PPOCritic | None = None

    def init_model(self) -> None:
        """Build the value model. Collective."""
        with self._closed_on_error():
            given = self._engines.get("critic")
            engine = self._open_engine(
                given or self.backend.configure_critic(self.config, self.numerics == "legacy")
            )
            rollout_n = self.config.get("rollout_n", 1)
            sizes = compute_rank_sizes(
                self.config, num_ranks=engine.topology.dp.size, rollout_n=rollout_n, where="critic"
            )
            self.critic = self.backend.critic(sizes, engine, numerics=self.numerics)
            self._rates = self._rates_of(engine, optim=block(self.config, "optim"), role="critic")

    def compute_values(self, data: DataProto) -> DataProto:
        """Return the values [B, W]."""
        critic = self._critic()
        num_ranks = critic.engine.topology.dp.size
        settings = {
            **critic.forward_sizes(self.config, num_ranks=num_ranks),
            "use_dynamic_bsz": bool(self.config.get("use_dynamic_bsz", False)),
        }
        requested = DataProto(
            data.batch, dict(data.non_tensor_batch), {**data.meta_info, **settings}
        )
        return DataProto.from_dict(tensors={"values": critic.compute_values(requested)})

    def update_critic(self, data: DataProto) -> DataProto:
        """Train on this rank's rows; ``meta_info["metrics"]`` has the old metrics."""
        critic = self._critic()
        lr, begin = self._rates.begin(), time.perf_counter()
        metrics = critic.update_on_rows(data.to("cpu"))
        self._rates.end()
        speed = self._machine(
            critic.engine,
            data,
            sizes=self.config,
            name="critic",
            elapsed_s=time.perf_counter() - begin,
        )
        return DataProto(meta_info={"metrics": {**metrics, **speed, "critic/lr": lr}})

    def _save(self, folder: str, hdfs_path: str | None, step: int, max_to_keep: int | None) -> None:
        save_step(self._critic().engine, folder, hdfs_path, step=step, max_to_keep=max_to_keep)

    def _load(self, folder: str | None, hdfs_path: str | None, delete_download: bool) -> None:
        load_step(self._critic().engine, folder, hdfs_path, delete_download=delete_download)

    def _critic(self) -> PPOCritic:
        if self.critic is None:
            raise EngineStateError("the critic has no model: call init_model() before.")
        return self.critic


def save_step(
    engine: BaseEngine,
    local_path: str,
    hdfs_path: str | None,
    *,
    step: int,
    max_to_keep: int | None,
) -> None:
    """Save a step directory below ``local_path`` in the engine's layout. Collective."""
    engine.save_checkpoint(local_path, hdfs_path, global_step=step, max_ckpt_to_keep=max_to_keep)


def load_step(
    engine: BaseEngine, local_path: str | None, hdfs_path: str | None, *, delete_download: bool
) -> None:
    """Load the last complete step below ``local_path``; None loads nothing, as before. Collective.

    Raises:
        ConfigError: the folder holds a checkpoint of the older generation.
    """
    if local_path is None:
        return
    old = sorted(Path(local_path).glob("model_world_size_*_rank_*.pt")) or sorted(
        Path(local_path).glob("dist_ckpt")
    )
    if old:
        raise ConfigError(
            f"{local_path} holds a checkpoint of the older generation ({old[0].name}): convert it "
            f"with `temper-migrate checkpoint {local_path} --to temper --out NEW` and load NEW."
        )
    # The old critic and Megatron workers set it by default, also where nothing was downloaded.
    engine.load_checkpoint(
        local_path, hdfs_path, del_local_after_load=delete_download and hdfs_path is not None
    )
