"""The engine: what a trainer calls, and what an author of an engine fills in.

The public methods are the contract and are written here once; the abstract ones with an underscore are what a backend knows how to do.
Order of calls: ``init_model``, ``set_loss_fn``, then per update ``optimizer_zero_grad``, forward and backward calls, ``optimizer_step``,
``lr_scheduler_step``. Gradients are reduced across ranks exactly once per update.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor

from temper_engine_api import checkpoint
from temper_engine_api.backend import MicroBatchLoss, ObjectT
from temper_engine_api.batch import Denominators, PackedBatch, SequenceBatch, concatenate
from temper_engine_api.capabilities import Capability
from temper_engine_api.errors import CapabilityError, ConfigError, EngineStateError
from temper_engine_api.hooks import (
    DEFAULT_OUTPUT,
    Context,
    HookedStep,
    LossFn,
    PostprocessFn,
    Predictions,
    PreprocessFn,
    RawBatch,
)
from temper_engine_api.metrics import LazyMetrics, Metric, materialize_metrics, merge_metrics
from temper_engine_api.objective import HeadOutput, HeadOutputs, LossTerms, Objective
from temper_engine_api.outputs import ForwardOutputs, StepResult, collect_outputs, gather_outputs
from temper_engine_api.padding import from_padded
from temper_engine_api.plan import build_packed_batch, plan_mini_batch, plan_single_micro_batch
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_engine_api.specs import PrecisionSpec
from temper_engine_api.updates import GradientState, UpdateCycle, UpdateReport
from temper_engine_api.weights import NamedWeight, TrainingState, WeightStream

__all__ = [
    "BaseEngine",
    "Context",
    "GradientState",
    "LossFn",
    "MicroBatchLoss",
    "ObjectT",
    "PostprocessFn",
    "Predictions",
    "PreprocessFn",
    "RawBatch",
    "UpdateReport",
]


class BaseEngine(UpdateCycle):
    """One rank of a training engine. Constructing it does no I/O and makes no process group."""

    def init_model(self) -> None:
        """Build everything; collective over the engine's ranks.

        Raises:
            CapabilityError: the configuration asks for what this engine does not claim.
        """
        needed = {
            Capability(self.config.model.model_type),
            *_needed_by_precision(self.config.precision),
        }
        needed |= (
            {Capability.ANY_OPTIMIZER}
            if self.config.optimizer is not None and not self.config.optimizer.is_adamw
            else set()
        )
        needed |= {Capability.ADAPTER} if self.config.lora.is_enabled else set()
        needed |= {Capability.ADAPTER_ON_EXPERTS} if self.config.lora.target_parameters else set()
        needed |= {Capability.OFFLOAD} if self.config.residency.offloads_anything else set()
        self.require(*needed)
        self._topology = self._build()

    def require(self, *needed: Capability) -> None:
        """Refuse with a sentence what is not claimed.

        Raises:
            CapabilityError: naming the engine and the capability.
        """
        for capability in sorted(set(needed) - self.capabilities):
            claimed = ", ".join(sorted(self.capabilities))
            raise CapabilityError(
                f"{type(self).__name__} does not offer {capability.value!r}; it offers {claimed}."
            )

    def set_loss_fn(
        self, loss: Objective | LossFn, *, required_outputs: Collection[HeadOutput] | None = None
    ) -> None:
        """An Objective, or an RFC callable together with what it wants predicted.

        Args:
            loss: an Objective; or a callable that sees whole sequences and whose scalar is taken as that call's mean, averaged over
                data-parallel ranks. Calls before a step add up. RFC callables are outside the invariance laws.
            needs: for an RFC callable; by default log-probs of a language model, values of a value model, scores of a reward model.
        """
        if isinstance(loss, Objective):
            if required_outputs is not None:
                raise ConfigError(
                    "required_outputs has no effect with an Objective, which declares its own: remove it."
                )
            self._objective, self._loss_fn = loss, None
            return
        self._objective, self._loss_fn = None, loss
        self._loss_fn_outputs = frozenset(
            {DEFAULT_OUTPUT[self.config.model.model_type]}
            if required_outputs is None
            else required_outputs
        )

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
        self,
        batch: PackedBatch,
        *,
        forward_only: bool,
        outputs: Collection[HeadOutput] = (),
        final: bool = True,
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
            micro_batch_loss, requested_outputs = None, asked
        else:
            objective = self._require_objective(batch)
            requested_outputs = objective.required_outputs | asked
            micro_batch_loss = _objective_loss(
                objective, denominators=batch.denominators, metrics=metrics
            )
        if not forward_only:
            self._record_backward(batch, final=final)
        head_outputs = self._run_micro_batches(
            batch,
            requested_outputs=requested_outputs,
            micro_batch_loss=micro_batch_loss,
            forward_only=forward_only,
            reduce_gradients=final and not forward_only,
        )
        metrics.append(self._collect_metrics())
        settled = LazyMetrics(lambda: materialize_metrics(merge_metrics(metrics)))
        if head_outputs is None or not asked or not self.topology.returns_outputs:
            return StepResult(outputs=None, metrics=settled)
        columns = {
            head_output: torch.cat([part[head_output] for part in head_outputs])
            for head_output in asked
        }
        return StepResult(outputs=collect_outputs(batch, columns), metrics=settled)

    @overload
    def forward_backward_step(
        self,
        batch: RawBatch,
        ctx: Context = ...,
        forward_only: Literal[False] = ...,
        preprocess_fn: PreprocessFn | None = ...,
        postprocess_fn: PostprocessFn | None = ...,
    ) -> tuple[Predictions | None, Tensor | None, Context]: ...

    @overload
    def forward_backward_step(
        self,
        batch: RawBatch,
        ctx: Context = ...,
        *,
        forward_only: Literal[True],
        preprocess_fn: PreprocessFn | None = ...,
        postprocess_fn: PostprocessFn | None = ...,
    ) -> tuple[Predictions | None, Context]: ...

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
        loss = self._loss_fn if self._objective is None else self._objective
        step = HookedStep(
            loss, packed=packed, ctx=ctx, postprocess=postprocess_fn, dp_size=self.topology.dp.size
        )
        if not forward_only:
            if loss is None:
                raise EngineStateError(
                    "no loss function is set: call set_loss_fn() before training."
                )
            self._record_backward(packed, final=False)
        head_outputs = self._run_micro_batches(
            packed,
            requested_outputs=self._hook_outputs(),
            micro_batch_loss=None if forward_only else step.loss,
            forward_only=forward_only,
            reduce_gradients=False,
        )
        returns_outputs = head_outputs is not None and self.topology.returns_outputs
        if forward_only:
            predictions = step.finish_forward(head_outputs)
            return (predictions if returns_outputs else None), step.ctx
        value = self._sum_over_data_parallel(step.total)
        return (step.predictions if returns_outputs else None), value, step.ctx

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
            pack_group_ids=batch.pack_group_ids.tolist(),
            dp_size=topology.dp.size,
            max_tokens=max_tokens,
            constraints=topology.plan_constraints,
        )
        return build_packed_batch(
            batch, plan=plan, rank=topology.dp.rank, denominators=count_denominators(batch)
        )

    def unshard_data(
        self, part: SequenceBatch, *, sample_ids: Tensor | None = None
    ) -> SequenceBatch:
        """The mini-batch of all data-parallel ranks again, on every rank, dummies dropped.

        Args:
            part: this rank's share.
            sample_ids: [B] the order wanted; ascending ids when None.
        """
        kept = (
            part.select(torch.nonzero(~part.is_dummy)[:, 0])
            if bool((~part.is_dummy).any())
            else None
        )
        mine = kept if self.topology.returns_outputs else None
        whole = concatenate([p for p in self._gather_objects(mine) if p is not None])
        place = {sample: i for i, sample in enumerate(whole.sample_ids.tolist())}
        order = sorted(place) if sample_ids is None else sample_ids.tolist()
        return whole.select([place[i] for i in order])

    def unshard_outputs(
        self, outputs: ForwardOutputs | None, *, sample_ids: Tensor
    ) -> ForwardOutputs:
        """Outputs of all ranks in the order of these ids [B], on every rank."""
        return gather_outputs(self._gather_objects(outputs), sample_ids=sample_ids)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Forward passes without the adapter: the reference policy. Weights exported inside are those of the base.

        Raises:
            EngineStateError: this engine has no adapter; and inside, by a backward pass.
        """
        self._require_adapter()
        with self._disable_adapter():
            self._is_adapter_disabled = True
            try:
                yield
            finally:
                self._is_adapter_disabled = False

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """What the two files of Hugging Face PEFT hold: the configuration, and full float32 tensors by their exact names. Collective.

        Raises:
            EngineStateError: this engine has no adapter.
        """
        self._require_adapter()
        with self._loaded("eval"):
            return self._export_adapter()

    def load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Load what ``export_adapter`` gave, strictly both ways; optimiser states stay as they are. Collective.

        Raises:
            ConfigError: with that configuration the same tensors would compute something else here.
            EngineStateError: this engine has no adapter.
            WeightError: a name is missing or unexpected, or a shape differs; nothing has been loaded then.
        """
        self._require_adapter()
        with self._loaded("eval"):
            self._load_adapter(config, tensors)

    def gather_objects(self, item: ObjectT) -> list[ObjectT]:
        """Small picklable objects of every rank in rank order, on every rank: what a loop without a driver agrees with. Collective."""
        return self._gather_objects(item)

    def export_weights(self) -> WeightStream:
        """``with engine.export_weights() as stream``: full tensors under Hugging Face names, lazily, same order on every rank."""
        return WeightStream(self._weights_while_resident())

    def load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Load full tensors under Hugging Face names. Collective; every rank passes the same stream.

        Raises:
            WeightError: a name is missing, unexpected or repeated, or a shape differs.
        """
        with self._loaded("eval"):
            self._load_weights(stream)

    def export_state(self) -> Iterator[TrainingState]:
        """The portable training state, parameter by parameter. Collective."""
        self.require(Capability.PORTABLE_STATE)
        with self._loaded("update"):
            yield from self._iterate_state()

    def load_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the portable training state. Collective."""
        self.require(Capability.PORTABLE_STATE)
        with self._loaded("update"):
            self._load_state(stream)

    def write_part(self, directory: str) -> checkpoint.PartReport:
        """This rank's files of the engine's part of a checkpoint, for a transaction with several participants. Collective."""
        with self._loaded("update"):
            files = self._write_state(directory)
        if self.topology.global_rank == 0:
            files = [
                *files,
                checkpoint.write_json(directory, checkpoint.PROGRESS_FILE, self._progress()),
            ]
        return checkpoint.report_part(directory, files)

    def stage_part(self, directory: str) -> None:
        """As ``write_part``, but return once the state is copied to host memory, and write it while training goes on. Collective.

        ``finish_part`` must be called before the next one. Of engines that claim BACKGROUND_SAVE.

        Raises:
            EngineStateError: the part before was not finished.
        """
        self.require(Capability.BACKGROUND_SAVE)
        if self._background_part.is_pending:
            raise EngineStateError(
                f"a part is still being written: call finish_part() before another one is staged in {directory}."
            )
        self.finish_saving()
        staged = self._stage()
        self._background_part.start(lambda: staged.write_part(directory), goal=Path(directory))

    @property
    def has_written_part(self) -> bool:
        """Whether ``finish_part`` need not wait on this rank."""
        return not self._background_part.is_pending or self._background_part.is_done

    def finish_part(self) -> checkpoint.PartReport:
        """Wait for what ``stage_part`` began; this rank's files. Collective.

        Raises:
            EngineStateError: nothing was staged.
        """
        report = self._background_part.finish()
        if report is None:
            raise EngineStateError(
                "no part is being written: call stage_part() before finish_part()."
            )
        return report

    def read_part(self, directory: str) -> None:
        """Read the engine's part of a checkpoint. Collective."""
        with self._loaded("update"):
            self._read_state(directory)
        self._restore_progress(checkpoint.read_json(directory, checkpoint.PROGRESS_FILE))
        self.optimizer_zero_grad()

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        *,
        in_background: bool = False,
    ) -> str:
        """One transaction with this engine as its only participant. Collective.

        In the background the state is copied to host memory now, and written, committed, uploaded and pruned while training goes on.
        At most one save is under way: the next one waits for it, so the last committed step is never older than the save before the
        last. Its failure is raised by the next ``optimizer_step`` after it, save, load, ``finish_saving`` or ``close``.

        Args:
            local_path: folder of step directories.
            hdfs_path: any fsspec URL that receives a copy; its manifest goes up last.
            global_step: number of the step directory.
            max_ckpt_to_keep: complete steps to keep, this one included; None keeps all.
            in_background: return as soon as the state is copied; of engines that claim BACKGROUND_SAVE.

        Returns:
            The step directory; committed, unless it is saved in the background.
        """
        self.finish_saving()
        if in_background:
            return self._save_in_background(
                local_path, hdfs_path, step=global_step, max_to_keep=max_ckpt_to_keep
            )
        return checkpoint.save_engine_checkpoint(
            self,
            local_path=local_path,
            remote_url=hdfs_path,
            step=global_step,
            max_to_keep=max_ckpt_to_keep,
            gather=self._gather_objects,
        )

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a step directory, or the last complete step of a folder of them. Collective.

        Args:
            local_path: a step directory or a folder of them; with hdfs_path, where the download goes.
            hdfs_path: any fsspec URL of a step directory.
            del_local_after_load: delete the copy that this call downloaded, never anything else.

        Raises:
            IncompleteCheckpointError: no manifest.
            DamagedCheckpointError: a file is missing or its checksum differs; names it.
            CheckpointError: a model with other parameters or shapes made it; nothing has changed then.
        """
        self.finish_saving()
        checkpoint.load_engine_checkpoint(
            self,
            local_path=local_path,
            remote_url=hdfs_path,
            delete_download=del_local_after_load,
            gather=self._gather_objects,
        )

    # How the above is done.

    def _save_in_background(
        self, local_path: str, remote_url: str | None, *, step: int, max_to_keep: int | None
    ) -> str:
        self.require(Capability.BACKGROUND_SAVE)
        goal = checkpoint.step_directory(local_path, step)
        staged = self._stage()
        self._background_save.start(
            lambda: checkpoint.save_engine_checkpoint(
                staged,
                local_path=local_path,
                remote_url=remote_url,
                step=step,
                max_to_keep=max_to_keep,
                gather=self._gather_in_background,
            ),
            goal=goal,
        )
        return str(goal)

    def _stage(self) -> checkpoint.StagedEngine:
        with self._loaded("update"):
            write = self._stage_state()
        return checkpoint.StagedEngine(
            config=self.config, topology=self.topology, write=write, progress=self._progress()
        )

    @contextmanager
    def _in_mode(self, mode: Literal["train", "eval"]) -> Iterator[None]:
        if self._mode is not None:
            raise EngineStateError(
                f"{mode}_mode() inside {self._mode}_mode(): leave the first one before."
            )
        with self._loaded(mode):
            self._mode = mode
            try:
                yield
            finally:
                self._mode = None

    def _require_adapter(self) -> None:
        self.require(Capability.ADAPTER)
        if not self.config.lora.is_enabled:
            raise EngineStateError(
                "this engine has no adapter: set lora.rank and lora.alpha, or lora.path."
            )

    def _check_can_run(self, *, forward_only: bool) -> None:
        if self._is_adapter_disabled and not forward_only:
            raise EngineStateError(
                "a backward pass inside disable_adapter(): the reference policy is not trained, leave the context before."
            )
        if self._mode is None or (self._mode == "eval" and not forward_only):
            wanted = "train_mode() or eval_mode()" if forward_only else "train_mode()"
            raise EngineStateError(
                f"a {'forward' if forward_only else 'backward'} pass needs `with engine.{wanted}`."
            )
        if not forward_only and self._gradients in (GradientState.REDUCED, GradientState.APPLIED):
            raise EngineStateError(
                "gradients of this update are already reduced: call optimizer_zero_grad() before the next update, "
                "and pass final=False to every call of an update but the last."
            )

    def _require_objective(self, batch: SequenceBatch) -> Objective:
        if self._objective is None:
            raise EngineStateError(
                "forward_backward_batch() needs an Objective: call set_loss_fn() with one before."
            )
        missing = self._objective.columns - batch.columns.keys() - batch.sequence_columns.keys()
        if missing:
            raise EngineStateError(
                f"objective {self._objective.name!r} reads columns that the batch lacks: {sorted(missing)}."
            )
        return self._objective

    def _hook_outputs(self) -> frozenset[HeadOutput]:
        if self._objective is not None:
            return self._objective.required_outputs
        return self._loss_fn_outputs or frozenset({DEFAULT_OUTPUT[self.config.model.model_type]})

    def _as_single_micro_batch(self, batch: RawBatch) -> PackedBatch:
        if isinstance(batch, Mapping):
            batch = from_padded(batch)
        if isinstance(batch, PackedBatch):
            denominators = batch.denominators
        else:
            counted = count_denominators(batch)
            local = torch.tensor(
                [counted.tokens, counted.sequences, counted.groups], dtype=torch.float64
            )
            tokens, sequences, groups = (
                int(n) for n in self._sum_over_data_parallel(local).tolist()
            )
            denominators = Denominators(tokens=tokens, sequences=sequences, groups=groups)
        plan = plan_single_micro_batch(
            batch.num_sequences, constraints=self.topology.plan_constraints
        )
        return build_packed_batch(batch, plan=plan, rank=0, denominators=denominators)

    def _weights_while_resident(self) -> Iterator[NamedWeight]:
        with self._loaded("eval"):
            yield from self._iterate_weights()


def _needed_by_precision(precision: PrecisionSpec) -> set[Capability]:
    is_other = (precision.parameters, precision.reduce, precision.buffers) != ("fp32",) * 3
    return ({Capability.FP16} if precision.compute == "fp16" else set()) | (
        {Capability.OTHER_DTYPES} if is_other else set()
    )


def _objective_loss(
    objective: Objective, *, denominators: Denominators, metrics: list[Mapping[str, Metric]]
) -> MicroBatchLoss:
    def loss_of(head_outputs: HeadOutputs, micro: SequenceBatch) -> Tensor:
        terms: LossTerms = objective(head_outputs, micro)
        loss = reduce_loss(
            terms, micro, denominators=denominators, aggregation=objective.aggregation
        )
        metrics.append({"loss": Metric(value=loss.detach(), reduction="sum"), **terms.metrics})
        return loss

    return loss_of
