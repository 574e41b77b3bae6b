"""The engine: what a trainer calls, and what an author of an engine fills in.

The public methods are the contract and are written here once; the abstract ones with an underscore are what a backend knows how to do.
Order of calls: ``init_model``, ``set_loss_fn``, then per update ``optimizer_zero_grad``, forward and backward calls, ``optimizer_step``,
``lr_scheduler_step``. Gradients are reduced across ranks exactly once per update.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from temper_engine_api import checkpoint
from temper_engine_api.batch import Denominators, PackedBatch, SequenceBatch, concatenate
from temper_engine_api.capabilities import Capability
from temper_engine_api.errors import CapabilityError, ConfigError, DamagedCheckpointError, EngineStateError
from temper_engine_api.metrics import Metric, merge_metrics, settle_metrics
from temper_engine_api.objective import Answers, LossTerms, Objective, Query
from temper_engine_api.outputs import Outputs, StepResult, gather_outputs, outputs_of
from temper_engine_api.padding import from_padded
from temper_engine_api.plan import pack_rank, plan_mini_batch, plan_single_micro_batch
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_engine_api.schedule import learning_rate
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology
from temper_engine_api.weights import NamedWeight, TrainingState, WeightStream

Context = MutableMapping[str, object] | None
"""What the RFC's hooks hand to each other."""
Predictions = Mapping[str, Tensor]
"""Columns by the value of their query, in the layout of the packed batch."""
RawBatch = PackedBatch | SequenceBatch | Mapping[str, Tensor]
"""What the RFC's loop may pass: a batch, or a padded mapping (see ``padding.from_padded``)."""
RfcLoss = Callable[[SequenceBatch, Predictions, Context], tuple[Tensor, Context]]
"""loss_fn(data, predictions, ctx) -> (scalar, ctx); the scalar is this call's mean and is averaged over data-parallel ranks."""
PreprocessFn = Callable[[RawBatch, Context], tuple[RawBatch, Context]]
"""Runs before the model."""
PostprocessFn = Callable[[Predictions, Context], tuple[Predictions, Context]]
"""Runs between the model and the loss; its predictions are what the loss sees."""
MicroLoss = Callable[[Answers, SequenceBatch], Tensor]
"""The scalar of one micro-batch, to be differentiated as it is; parts add up over micro-batches and data-parallel ranks."""

ObjectT = TypeVar("ObjectT")


class Gradients(Enum):
    """What the gradient buffers hold."""

    EMPTY = "empty"
    """Nothing since the last ``optimizer_zero_grad``."""
    PENDING = "pending"
    """Local sums that are not yet reduced."""
    FINAL = "final"
    """Reduced across ranks; only ``optimizer_step`` or ``optimizer_zero_grad`` may follow."""
    SPENT = "spent"
    """Used by ``optimizer_step``; only ``optimizer_zero_grad`` may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What the last ``optimizer_step`` did, the same on every rank."""

    grad_norm: float
    """Global norm before clipping; NaN or infinite when skipped for that reason; 0.0 when nothing was trained."""
    outcome: Literal["stepped", "nonfinite", "nothing_trained"]
    """Both others left weights, optimiser states and learning rate untouched."""
    sample_ids: tuple[int, ...]
    """Of this rank's samples, given only when the update was skipped for a non-finite gradient."""


class BaseEngine(ABC):
    """One rank of a training engine. Constructing it does no I/O and makes no process group."""

    config_class: ClassVar[type[EngineConfig]]
    """The frozen dataclass that configures this engine."""
    capabilities: ClassVar[frozenset[Capability]]
    """What it claims; see Capability."""

    def __init__(self, config: EngineConfig) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(f"{type(self).__name__} takes a {self.config_class.__name__}, not a {type(config).__name__}.")
        self.config = config
        self.last_update: UpdateReport | None = None
        self.num_nonfinite_updates = 0
        self.num_updates = 0
        self.num_schedule_steps = 0
        self._topology: Topology | None = None
        self._objective: Objective | None = None
        self._rfc_loss: RfcLoss | None = None
        self._rfc_needs: frozenset[Query] = frozenset()
        self._mode: Literal["train", "eval"] | None = None
        self._gradients = Gradients.EMPTY
        self._trains_something = False
        self._pending_sample_ids: list[Tensor] = []
        self._consecutive_skips = 0

    # What a backend fills in.

    @abstractmethod
    def _build(self) -> Topology:
        """Build or load model, head, optimiser; join the process group or make one."""

    @abstractmethod
    def _run_schedule(
        self,
        batch: PackedBatch,
        *,
        queries: frozenset[Query],
        micro_loss: MicroLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[Answers] | None:
        """Run the micro-batches of a plan through the model, and back where ``forward_only`` is False.

        Args:
            batch: this rank's share, on any device.
            queries: what the head is asked. With ``micro_loss`` and not ``forward_only``, only trained positions need an answer;
                otherwise every position that has a predecessor.
            micro_loss: None, or the scalar to differentiate (or, with ``forward_only``, to evaluate) for each micro-batch.
            forward_only: no gradients, no dropout, no graph kept.
            reduce_gradients: reduce across ranks together with the last micro-batch; otherwise gradients stay local and add up.

        Returns:
            Detached answers per micro-batch, or None where this rank returns no outputs.
        """

    @abstractmethod
    def _reduce_pending_gradients(self) -> None:
        """Reduce local gradients across ranks by sum."""

    @abstractmethod
    def _apply_gradients(self, *, lr: float) -> float:
        """Global gradient norm in float32 before clipping; clips and updates only if it is finite (the same on every rank)."""

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Drop gradients."""

    @abstractmethod
    def _resident(self, mode: Literal["train", "eval", "update"]) -> AbstractContextManager[None]:
        """Bring in what a mode needs and put it back on exit, also when the body raises. Nested entries cost nothing."""

    @abstractmethod
    def _iterate_weights(self) -> Iterator[NamedWeight]:
        """Full tensors, float32 or the dtype of the compute, in one order on every rank. Collective."""

    @abstractmethod
    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Strict both ways; checks names and shapes before the first weight changes where the stream's manifest allows it."""

    @abstractmethod
    def _iterate_state(self) -> Iterator[TrainingState]:
        """The portable training state. Collective."""

    @abstractmethod
    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the portable training state, strict both ways. Collective."""

    @abstractmethod
    def _write_state(self, directory: str) -> list[str]:
        """Write parameters, optimiser and RNG states; return relative paths of the files this rank wrote. Collective."""

    @abstractmethod
    def _read_state(self, directory: str) -> None:
        """Read what ``_write_state`` wrote, at this or another layout. Collective."""

    @abstractmethod
    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        """Sum over data-parallel ranks, and the same on every rank of a replica, also where the loss lives on the last stage."""

    @abstractmethod
    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        """Small picklable objects of every rank in rank order, on every rank."""

    @abstractmethod
    def to(self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and gradients, or optimiser states, by hand."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and the process groups this engine made; a second engine may follow in the same process."""

    # The contract, written once.

    @property
    def topology(self) -> Topology:
        """Sizes and ranks.

        Raises:
            EngineStateError: before ``init_model``.
        """
        if self._topology is None:
            raise EngineStateError("the topology is known only after init_model().")
        return self._topology

    @property
    def model_type(self) -> str:
        """language_model, value_model or reward_model."""
        return self.config.model.model_type

    @property
    def objective(self) -> Objective | None:
        """What ``set_loss_fn`` was given, when it was an Objective."""
        return self._objective

    def init_model(self) -> None:
        """Build everything; collective over the engine's ranks.

        Raises:
            CapabilityError: the configuration asks for what this engine does not claim.
        """
        needed = {Capability(self.config.model.model_type)}
        needed |= {Capability.ADAPTER} if self.config.lora.rank > 0 else set()
        residency = self.config.residency
        needed |= {Capability.OFFLOAD} if residency.offload_parameters or residency.offload_optimizer else set()
        self.require(*needed)
        self._topology = self._build()

    def require(self, *needed: Capability) -> None:
        """Refuse with a sentence what is not claimed.

        Raises:
            CapabilityError: naming the engine and the capability.
        """
        for capability in sorted(set(needed) - self.capabilities):
            claimed = ", ".join(sorted(self.capabilities))
            raise CapabilityError(f"{type(self).__name__} does not offer {capability.value!r}; it offers {claimed}.")

    def set_loss_fn(self, loss: Objective | RfcLoss, *, needs: Collection[Query] | None = None) -> None:
        """An Objective, or an RFC callable together with what it wants predicted.

        Args:
            loss: an Objective; or a callable that sees whole sequences and whose scalar is taken as that call's mean, averaged over
                data-parallel ranks. Calls before a step add up. RFC callables are outside the invariance laws.
            needs: for an RFC callable; by default log-probs of a language model, values of a value model, scores of a reward model.
        """
        if isinstance(loss, Objective):
            if needs is not None:
                raise ConfigError("needs has no effect with an Objective, which declares its own: remove it.")
            self._objective, self._rfc_loss = loss, None
            return
        default = {"language_model": Query.LOGPROB, "value_model": Query.VALUE, "reward_model": Query.SCORE}[self.model_type]
        self._objective, self._rfc_loss = None, loss
        self._rfc_needs = frozenset({default} if needs is None else needs)

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Training behaviour and residency; gradients survive leaving it."""
        with self._in_mode("train"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Evaluation behaviour (no dropout) and residency of parameters only."""
        with self._in_mode("eval"):
            yield

    def forward_backward_batch(
        self, batch: PackedBatch, *, forward_only: bool, outputs: Collection[Query] = (), final: bool = True
    ) -> StepResult:
        """This rank's share of one mini-batch, in the micro-batches its plan says.

        Args:
            batch: this rank's share.
            forward_only: no backward. With ``outputs`` only they are computed; without them the objective is evaluated.
            outputs: what to return per token; during training the untrained positions of an answer are 0.
            final: reduce gradients across ranks; False when more calls of the same update follow.

        Raises:
            EngineStateError: outside a mode, after a final call of this update, or without an objective when one is needed.
        """
        self._check_can_run(forward_only=forward_only)
        asked = frozenset(outputs)
        metrics: list[Mapping[str, Metric]] = []
        if forward_only and asked:
            micro_loss, queries = None, asked
        else:
            objective = self._require_objective(batch)
            queries = objective.needs | asked
            micro_loss = _objective_loss(objective, denominators=batch.denominators, metrics=metrics)
        if not forward_only:
            self._note_training(batch, final=final)
        answers = self._run_schedule(
            batch,
            queries=queries,
            micro_loss=micro_loss,
            forward_only=forward_only,
            reduce_gradients=final and not forward_only,
        )
        settled = settle_metrics(merge_metrics(metrics))
        if answers is None or not asked:
            return StepResult(outputs=None, metrics=settled)
        columns = {query: torch.cat([answer[query] for answer in answers]) for query in asked}
        return StepResult(outputs=outputs_of(batch, columns), metrics=settled)

    def forward_backward_step(
        self,
        batch: RawBatch,
        ctx: Context = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> tuple[Predictions | None, Tensor | None, Context] | tuple[Predictions | None, Context]:
        """One micro-batch through the RFC's hooks; never the final call of an update.

        Returns:
            (predictions, loss, ctx), or (predictions, ctx) when ``forward_only``. The loss is the same on every rank; predictions are
            detached, and None where this rank returns no outputs.

        Raises:
            EngineStateError: outside a mode, or without a loss function in training.
        """
        self._check_can_run(forward_only=forward_only)
        if preprocess_fn is not None:
            batch, ctx = preprocess_fn(batch, ctx)
        packed = self._as_single_micro_batch(batch)
        step = _RfcStep(self, packed=packed, ctx=ctx, postprocess=postprocess_fn)
        if not forward_only:
            if self._objective is None and self._rfc_loss is None:
                raise EngineStateError("no loss function is set: call set_loss_fn() before training.")
            self._note_training(packed, final=False)
        answers = self._run_schedule(
            packed,
            queries=step.queries,
            micro_loss=None if forward_only else step.loss,
            forward_only=forward_only,
            reduce_gradients=False,
        )
        if forward_only:
            return step.predictions_of(answers), step.ctx
        value = self._sum_over_data_parallel(step.total)
        return (None if answers is None else step.predictions), value, step.ctx

    def optimizer_zero_grad(self) -> None:
        """Drop gradients and begin an update."""
        self._zero_gradients()
        self._gradients, self._trains_something, self._pending_sample_ids = Gradients.EMPTY, False, []

    def optimizer_step(self) -> float:
        """Finalise what is pending, clip, update.

        A non-finite gradient on any rank, or a mini-batch that trains nothing, leaves weights, optimiser states and learning rate
        untouched on every rank; ``last_update`` says so.

        Returns:
            The global gradient norm before clipping.

        Raises:
            EngineStateError: no gradients, no optimiser, or too many non-finite updates in a row.
        """
        if self.config.optimizer is None:
            raise EngineStateError("this engine was configured without an optimiser (optimizer: null) and can't step.")
        if self._gradients in (Gradients.EMPTY, Gradients.SPENT):
            raise EngineStateError("there are no gradients: run a forward and backward between optimizer_zero_grad() and optimizer_step().")
        with self._resident("update"):
            if self._gradients is Gradients.PENDING:
                self._reduce_pending_gradients()
                self._gradients = Gradients.FINAL
            norm = self._apply_gradients(lr=self.current_lr) if self._trains_something else 0.0
        self._gradients = Gradients.SPENT
        self._report_update(norm)
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule, unless the last update was skipped.

        Returns:
            The learning rate of the next update.
        """
        if self.last_update is None or self.last_update.outcome == "stepped":
            self.num_schedule_steps += 1
        return self.current_lr

    @property
    def current_lr(self) -> float:
        """Learning rate of the next update."""
        if self.config.optimizer is None:
            return 0.0
        return learning_rate(self.num_schedule_steps, peak=self.config.optimizer.lr, spec=self.config.schedule)

    def shard_data(self, batch: SequenceBatch, *, max_tokens: int, seed: int = 0) -> PackedBatch:
        """This rank's share of a mini-batch that every rank holds whole; every rank computes the same plan without communication.

        Args:
            batch: the mini-batch over all ranks.
            max_tokens: cap of a micro-batch.
            seed: for objectives with batch statistics.
        """
        topology = self.topology
        if self._objective is not None:
            batch = batch.with_columns(self._objective.prepare(batch, seed=seed))
        plan = plan_mini_batch(
            batch.lengths.tolist(),
            atom_ids=batch.atom_ids.tolist(),
            dp_size=topology.dp.size,
            max_tokens=max_tokens,
            constraints=topology.plan_constraints,
        )
        return pack_rank(batch, plan=plan, rank=topology.dp.rank, denominators=count_denominators(batch))

    def unshard_data(self, part: SequenceBatch, *, sample_ids: Tensor | None = None) -> SequenceBatch:
        """The mini-batch of all data-parallel ranks again, on every rank, dummies dropped.

        Args:
            part: this rank's share.
            sample_ids: [B] the order wanted; ascending ids when None.
        """
        kept = part.select(torch.nonzero(~part.is_dummy)[:, 0]) if bool((~part.is_dummy).any()) else None
        mine = kept if self.topology.returns_outputs else None
        whole = concatenate([p for p in self._gather_objects(mine) if p is not None])
        place = {sample: i for i, sample in enumerate(whole.sample_ids.tolist())}
        order = sorted(place) if sample_ids is None else sample_ids.tolist()
        return whole.select([place[i] for i in order])

    def unshard_outputs(self, outputs: Outputs | None, *, sample_ids: Tensor) -> Outputs:
        """Outputs of all ranks in the order of these ids [B], on every rank."""
        return gather_outputs(self._gather_objects(outputs), sample_ids=sample_ids)

    @contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """Forward passes without the adapter: the reference policy."""
        self.require(Capability.ADAPTER)
        with self._adapter_off():
            yield

    def _adapter_off(self) -> AbstractContextManager[None]:
        """Of engines that claim ADAPTER."""
        raise NotImplementedError

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """Hugging Face PEFT config and tensors under their exact names."""
        self.require(Capability.ADAPTER)
        raise NotImplementedError

    def load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Load what ``export_adapter`` gave; strict."""
        self.require(Capability.ADAPTER)
        raise NotImplementedError

    def export_weights(self) -> WeightStream:
        """``with engine.export_weights() as stream``: full tensors under Hugging Face names, lazily, same order on every rank."""
        return WeightStream(self._weights_while_resident())

    def load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Load full tensors under Hugging Face names. Collective; every rank passes the same stream.

        Raises:
            WeightError: a name is missing, unexpected or repeated, or a shape differs.
        """
        with self._resident("eval"):
            self._load_weights(stream)

    def export_state(self) -> Iterator[TrainingState]:
        """The portable training state, parameter by parameter. Collective."""
        self.require(Capability.PORTABLE_STATE)
        with self._resident("update"):
            yield from self._iterate_state()

    def load_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the portable training state. Collective."""
        self.require(Capability.PORTABLE_STATE)
        with self._resident("update"):
            self._load_state(stream)

    def write_part(self, directory: str) -> checkpoint.PartReport:
        """This rank's files of the engine's part of a checkpoint, for a transaction with several participants. Collective."""
        with self._resident("update"):
            files = self._write_state(directory)
        if self.topology.global_rank == 0:
            files = [*files, checkpoint.write_json(directory, "progress.json", self._progress())]
        return checkpoint.report_part(directory, files)

    def read_part(self, directory: str) -> None:
        """Read the engine's part of a checkpoint. Collective."""
        with self._resident("update"):
            self._read_state(directory)
        self._restore_progress(checkpoint.read_json(directory, "progress.json"))
        self.optimizer_zero_grad()

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> str:
        """One transaction with this engine as its only participant. Collective.

        Args:
            local_path: folder of step directories.
            hdfs_path: any fsspec URL that receives a copy; its manifest goes up last.
            global_step: number of the step directory.
            max_ckpt_to_keep: complete steps to keep, this one included; None keeps all.

        Returns:
            The committed step directory.
        """
        return checkpoint.save_alone(
            self,
            local_path=local_path,
            remote_url=hdfs_path,
            step=global_step,
            max_to_keep=max_ckpt_to_keep,
            gather=self._gather_objects,
        )

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:
        """Load a step directory, or the last complete step of a folder of them. Collective.

        Args:
            local_path: a step directory or a folder of them; with hdfs_path, where the download goes.
            hdfs_path: any fsspec URL of a step directory.
            del_local_after_load: delete the copy that this call downloaded, never anything else.

        Raises:
            IncompleteCheckpointError: no manifest.
            DamagedCheckpointError: a file is missing or its checksum differs; names it.
        """
        checkpoint.load_alone(
            self,
            local_path=local_path,
            remote_url=hdfs_path,
            delete_download=del_local_after_load,
            gather=self._gather_objects,
        )

    # How the above is done.

    @contextmanager
    def _in_mode(self, mode: Literal["train", "eval"]) -> Iterator[None]:
        if self._mode is not None:
            raise EngineStateError(f"{mode}_mode() inside {self._mode}_mode(): leave the first one before.")
        with self._resident(mode):
            self._mode = mode
            try:
                yield
            finally:
                self._mode = None

    def _check_can_run(self, *, forward_only: bool) -> None:
        if self._mode is None or (self._mode == "eval" and not forward_only):
            wanted = "train_mode() or eval_mode()" if forward_only else "train_mode()"
            raise EngineStateError(f"a {'forward' if forward_only else 'backward'} pass needs `with engine.{wanted}`.")
        if not forward_only and self._gradients in (Gradients.FINAL, Gradients.SPENT):
            raise EngineStateError(
                "gradients of this update are already reduced: call optimizer_zero_grad() before the next update, "
                "and pass final=False to every call of an update but the last."
            )

    def _require_objective(self, batch: SequenceBatch) -> Objective:
        if self._objective is None:
            raise EngineStateError("forward_backward_batch() needs an Objective: call set_loss_fn() with one before.")
        missing = self._objective.columns - batch.columns.keys() - batch.sequence_columns.keys()
        if missing:
            raise EngineStateError(f"objective {self._objective.name!r} reads columns that the batch lacks: {sorted(missing)}.")
        return self._objective

    def _note_training(self, batch: PackedBatch, *, final: bool) -> None:
        if self.config.optimizer is None:
            raise EngineStateError("this engine was configured without an optimiser (optimizer: null) and can't train.")
        self._gradients = Gradients.FINAL if final else Gradients.PENDING
        self._trains_something |= self._rfc_loss is not None or not batch.denominators.is_empty
        self._pending_sample_ids.append(batch.sample_ids)

    def _as_single_micro_batch(self, batch: RawBatch) -> PackedBatch:
        if isinstance(batch, Mapping):
            batch = from_padded(batch)
        if isinstance(batch, PackedBatch):
            denominators = batch.denominators
        else:
            counted = count_denominators(batch)
            local = torch.tensor([counted.tokens, counted.sequences, counted.groups], dtype=torch.float64)
            tokens, sequences, groups = (int(n) for n in self._sum_over_data_parallel(local).tolist())
            denominators = Denominators(tokens=tokens, sequences=sequences, groups=groups)
        plan = plan_single_micro_batch(batch.num_sequences, constraints=self.topology.plan_constraints)
        return pack_rank(batch, plan=plan, rank=0, denominators=denominators)

    def _report_update(self, norm: float) -> None:
        if not self._trains_something:
            self.last_update = UpdateReport(grad_norm=norm, outcome="nothing_trained", sample_ids=())
        elif math.isfinite(norm):
            self.num_updates += 1
            self._consecutive_skips = 0
            self.last_update = UpdateReport(grad_norm=norm, outcome="stepped", sample_ids=())
        else:
            self._report_nonfinite(norm)

    def _report_nonfinite(self, norm: float) -> None:
        ids = torch.cat(self._pending_sample_ids) if self._pending_sample_ids else torch.empty(0, dtype=torch.int64)
        self.num_nonfinite_updates += 1
        self._consecutive_skips += 1
        self.last_update = UpdateReport(grad_norm=norm, outcome="nonfinite", sample_ids=tuple(ids[ids >= 0].tolist()))
        assert self.config.optimizer is not None
        if self._consecutive_skips > self.config.optimizer.max_consecutive_skips:
            raise EngineStateError(
                f"{self._consecutive_skips} updates in a row had a non-finite gradient (norm {norm}); the last batch holds samples "
                f"{self.last_update.sample_ids[:8]}. Lower optimizer.lr or look at those samples; "
                "optimizer.max_consecutive_skips is how many are passed over."
            )

    def _weights_while_resident(self) -> Iterator[NamedWeight]:
        with self._resident("eval"):
            yield from self._iterate_weights()

    def _progress(self) -> Mapping[str, object]:
        return {
            "num_updates": self.num_updates,
            "num_schedule_steps": self.num_schedule_steps,
            "num_nonfinite_updates": self.num_nonfinite_updates,
            "consecutive_skips": self._consecutive_skips,
        }

    def _restore_progress(self, progress: Mapping[str, object]) -> None:
        names = list(self._progress())
        counts = [count for count in map(progress.get, names) if isinstance(count, int)]
        if len(counts) < len(names):
            raise DamagedCheckpointError(f"progress.json should hold the counters {names}, but holds {dict(progress)}.")
        self.num_updates, self.num_schedule_steps, self.num_nonfinite_updates, self._consecutive_skips = counts
        self.last_update = None


def _objective_loss(objective: Objective, *, denominators: Denominators, metrics: list[Mapping[str, Metric]]) -> MicroLoss:
    def loss_of(answers: Answers, micro: SequenceBatch) -> Tensor:
        terms: LossTerms = objective(answers, micro)
        loss = reduce_loss(terms, micro, denominators=denominators, aggregation=objective.aggregation)
        metrics.append({"loss": Metric(value=loss.detach(), reduction="sum"), **terms.metrics})
        return loss

    return loss_of


class _RfcStep:
    """One call through the RFC's hooks: keeps what passes between them."""

    def __init__(self, engine: BaseEngine, *, packed: PackedBatch, ctx: Context, postprocess: PostprocessFn | None) -> None:
        self.ctx = ctx
        self.predictions: Predictions = {}
        self.total = torch.zeros(())
        self._packed = packed
        self._postprocess = postprocess
        self._objective = engine.objective
        self._rfc_loss = engine._rfc_loss
        self._dp_size = engine.topology.dp.size
        self.queries = self._objective.needs if self._objective is not None else engine._rfc_needs
        if not self.queries:
            default = {"language_model": Query.LOGPROB, "value_model": Query.VALUE, "reward_model": Query.SCORE}
            self.queries = frozenset({default[engine.model_type]})

    def loss(self, answers: Answers, micro: SequenceBatch) -> Tensor:
        """The scalar to differentiate for one micro-batch; a dummy that pads a schedule has a zero one."""
        if bool(micro.is_dummy.all()):
            return torch.stack([column.sum() for column in answers.columns.values()]).sum() * 0.0
        predictions: Predictions = {query.value: column for query, column in answers.columns.items()}
        if self._postprocess is not None:
            predictions, self.ctx = self._postprocess(predictions, self.ctx)
        if self._objective is not None:
            terms = self._objective(answers, micro)
            loss = reduce_loss(terms, micro, denominators=self._packed.denominators, aggregation=self._objective.aggregation)
        else:
            assert self._rfc_loss is not None
            loss, self.ctx = self._rfc_loss(micro, predictions, self.ctx)
            loss = loss / self._dp_size
        self.predictions = {name: column.detach() for name, column in predictions.items()}
        self.total = self.total + loss.detach().to(self.total.device)
        return loss

    def predictions_of(self, answers: list[Answers] | None) -> Predictions | None:
        """Detached predictions of a forward pass, through the postprocess hook."""
        if answers is None:
            return None
        predictions: Predictions = {query.value: column for query, column in answers[0].columns.items()}
        if self._postprocess is not None:
            predictions, self.ctx = self._postprocess(predictions, self.ctx)
        return predictions
