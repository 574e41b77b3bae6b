"""Base class of training engines: the methods that a trainer calls.

The public methods are implemented here, once for all engines. They call the abstract methods of
`backend.EngineBackend`, which an engine implements, and the update cycle of `updates.UpdateCycle`.
Order of calls: `init_model`, `set_loss_fn`, then for each update `optimizer_zero_grad`, forward and
backward passes, `optimizer_step`, `lr_scheduler_step`. Gradients are reduced over ranks exactly
once per update.
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
    """One rank of a training engine. The constructor does no I/O and creates no process group."""

    def init_model(self) -> None:
        """Build the model, optimizer and process groups. Collective.

        Raises:
            CapabilityError: If the configuration needs a capability that the engine does not claim.
        """
        needed = {
            Capability(self.config.model.model_type),
            *_find_precision_capabilities(self.config.precision),
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
        """Check that the engine claims these capabilities.

        Raises:
            CapabilityError: If it does not; names the engine and the first missing capability.
        """
        for capability in sorted(set(needed) - self.capabilities):
            claimed = ", ".join(sorted(self.capabilities))
            raise CapabilityError(
                f"{type(self).__name__} does not offer {capability.value!r}; it offers {claimed}."
            )

    def set_loss_fn(
        self, loss: Objective | LossFn, *, required_outputs: Collection[HeadOutput] | None = None
    ) -> None:
        """Set the loss: an Objective, or a plain function.

        Args:
            loss: An Objective; or a function of complete sequences that returns a mean. Its value
                is averaged over data-parallel ranks, and calls before a step add up. With a plain
                function the gradient may depend on how the mini-batch is split.
            required_outputs: Outputs that a plain function needs. By default the log-probs of a
                language model, the values of a value model or the scores of a reward model.

        Raises:
            ConfigError: If `required_outputs` is given for an Objective.
        """
        if isinstance(loss, Objective):
            if required_outputs is not None:
                raise ConfigError(
                    "required_outputs has no effect with an Objective, which has its own: remove it."
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
        """Enter training mode and load what it needs; gradients are kept on exit."""
        with self._in_mode("train"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Enter evaluation mode (no dropout) and load the parameters only."""
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
        """Run forward and backward passes over this rank's micro-batches of a mini-batch.

        Args:
            batch: This rank's micro-batches.
            forward_only: Skip the backward pass. If `outputs` are requested, only they are
                computed; otherwise the objective is evaluated.
            outputs: Head outputs to return. In training, untrained positions are 0.
            final: Reduce gradients over ranks. Pass False if more calls of this update follow.

        Raises:
            EngineStateError: If called outside a mode, after the final call of this update, or
                without an objective that is needed.
        """
        self._check_can_run(forward_only=forward_only)
        requested = frozenset(outputs)
        metrics: list[Mapping[str, Metric]] = []
        if forward_only and requested:
            micro_batch_loss, requested_outputs = None, requested
        else:
            objective = self._require_objective(batch)
            requested_outputs = objective.required_outputs | requested
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
        if head_outputs is None or not requested or not self.topology.returns_outputs:
            return StepResult(outputs=None, metrics=settled)
        columns = {
            head_output: torch.cat([part[head_output] for part in head_outputs])
            for head_output in requested
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
        """Run one micro-batch through the model and the given hooks.

        Gradients stay local and accumulate; `optimizer_step` reduces them.

        Args:
            batch: A batch, or a padded mapping as for `padding.from_padded`.
            ctx: State that the hooks pass on.
            forward_only: Skip the loss and the backward pass.
            preprocess_fn: Hook that runs before the model.
            postprocess_fn: Hook that runs between the model and the loss.

        Returns:
            (predictions, loss, ctx), or (predictions, ctx) if `forward_only`. The loss is the same
            on every rank. Predictions are detached, and None on ranks without
            `topology.returns_outputs`.

        Raises:
            EngineStateError: If called outside a mode, or in training without a loss function.
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
                    "there is no loss function: call set_loss_fn() before training."
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
            predictions = step.postprocess_outputs(head_outputs)
            return (predictions if returns_outputs else None), step.ctx
        value = self._sum_over_data_parallel(step.total)
        return (step.predictions if returns_outputs else None), value, step.ctx

    def shard_data(self, batch: SequenceBatch, *, max_tokens: int, seed: int = 0) -> PackedBatch:
        """Plan a mini-batch and return this rank's packed batch, without communication.

        Args:
            batch: The full mini-batch, the same on every rank.
            max_tokens: Token cap of a micro-batch.
            seed: Seed for the objective's `prepare`.
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
        """Gather the mini-batch of all data-parallel ranks to every rank, without dummies. Collective.

        Args:
            part: This rank's sequences.
            sample_ids: [B] ids in the order to return; None sorts by id.
        """
        kept = (
            part.select(torch.nonzero(~part.is_dummy)[:, 0])
            if bool((~part.is_dummy).any())
            else None
        )
        # Ranks of one replica have the same samples, so only one of them contributes.
        local = kept if self.topology.returns_outputs else None
        full = concatenate([p for p in self._gather_objects(local) if p is not None])
        position = {sample: i for i, sample in enumerate(full.sample_ids.tolist())}
        order = sorted(position) if sample_ids is None else sample_ids.tolist()
        return full.select([position[i] for i in order])

    def unshard_outputs(
        self, outputs: ForwardOutputs | None, *, sample_ids: Tensor
    ) -> ForwardOutputs:
        """Gather the outputs of all ranks to every rank, in the order of these ids [B]. Collective."""
        return gather_outputs(self._gather_objects(outputs), sample_ids=sample_ids)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable the adapter, so that forward passes compute the reference policy.

        Weights exported inside the context are those of the base model. A backward pass inside it
        raises EngineStateError.

        Raises:
            EngineStateError: If the engine has no adapter.
        """
        self._require_adapter()
        with self._disable_adapter():
            self._is_adapter_disabled = True
            try:
                yield
            finally:
                self._is_adapter_disabled = False

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """Return the adapter's PEFT config and its full float32 tensors by PEFT name. Collective.

        Raises:
            EngineStateError: If the engine has no adapter.
        """
        self._require_adapter()
        with self._loaded("eval"):
            return self._export_adapter()

    def load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Load an adapter from `export_adapter`; optimizer states do not change. Collective.

        Raises:
            ConfigError: If the tensors would compute something else under this engine's settings.
            EngineStateError: If the engine has no adapter.
            WeightError: If a name is missing or unexpected, or a shape differs. No tensor is
                loaded then.
        """
        self._require_adapter()
        with self._loaded("eval"):
            self._load_adapter(config, tensors)

    def gather_objects(self, item: ObjectT) -> list[ObjectT]:
        """Gather small picklable objects from all ranks to all ranks, in rank order. Collective."""
        return self._gather_objects(item)

    def export_weights(self) -> WeightStream:
        """Return a stream of full tensors by Hugging Face name, in the same order on every rank.

        Use it as `with engine.export_weights() as stream`. Tensors are gathered one by one while
        the stream is read. Collective.
        """
        return WeightStream(self._weights_while_resident())

    def load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Load full tensors by Hugging Face name. Collective; every rank passes the same stream.

        Raises:
            WeightError: If a name is missing, unexpected or repeated, or a shape differs.
        """
        with self._loaded("eval"):
            self._load_weights(stream)

    def export_state(self) -> Iterator[TrainingState]:
        """Iterate over the portable training state, one parameter at a time. Collective."""
        self.require(Capability.PORTABLE_STATE)
        with self._loaded("update"):
            yield from self._iterate_state()

    def load_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the portable training state. Collective."""
        self.require(Capability.PORTABLE_STATE)
        with self._loaded("update"):
            self._load_state(stream)

    def write_part(self, directory: str) -> checkpoint.PartReport:
        """Write this engine's files of a checkpoint with several participants. Collective.

        Returns:
            Sizes and checksums of this rank's files, for `CheckpointTransaction.commit`.
        """
        with self._loaded("update"):
            files = self._write_state(directory)
        if self.topology.global_rank == 0:
            files = [
                *files,
                checkpoint.write_json(directory, checkpoint.PROGRESS_FILE, self._progress()),
            ]
        return checkpoint.report_part(directory, files)

    def stage_part(self, directory: str) -> None:
        """Copy the state to host memory and write it like `write_part` while training continues.

        Collective; needs BACKGROUND_SAVE. Call `finish_part` before the next `stage_part`.

        Raises:
            EngineStateError: If the previous `stage_part` was not finished.
        """
        self.require(Capability.BACKGROUND_SAVE)
        if self._background_part.is_pending:
            raise EngineStateError(
                f"can't stage a part in {directory}: the previous one is still being written: call "
                "finish_part() first."
            )
        self.finish_saving()
        staged = self._stage()
        self._background_part.start(lambda: staged.write_part(directory), goal=Path(directory))

    @property
    def has_written_part(self) -> bool:
        """True if `finish_part` would not block on this rank."""
        return not self._background_part.is_pending or self._background_part.is_done

    def finish_part(self) -> checkpoint.PartReport:
        """Wait for `stage_part` and return its report of this rank's files. Collective.

        Raises:
            EngineStateError: If no part was staged.
        """
        report = self._background_part.finish()
        if report is None:
            raise EngineStateError(
                "no part is being written: call stage_part() before finish_part()."
            )
        return report

    def read_part(self, directory: str) -> None:
        """Load the files of `write_part` or `stage_part`, and reset gradients. Collective."""
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
        """Save a checkpoint of this engine. Collective.

        A background save copies the state to host memory, then writes, commits, uploads and prunes
        while training continues. At most one save runs at a time: the next one waits for it, so at
        most the last save can be uncommitted. Its error is raised by the next `optimizer_step` after it
        failed, or by the next save, load, `finish_saving` or `close`.

        Args:
            local_path: Folder of step directories, on a file system that all ranks share.
            hdfs_path: fsspec URL that gets a copy, for example `s3://bucket/run`. The manifest is
                uploaded last.
            global_step: Number of the step directory.
            max_ckpt_to_keep: Number of complete steps to keep, including this one; None keeps all.
            in_background: Return once the state is copied; needs BACKGROUND_SAVE.

        Returns:
            Path of the step directory; it exists once the save is committed.
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
        """Load a step directory, or the latest complete step of a folder of them. Collective.

        Args:
            local_path: Step directory or folder of them; with `hdfs_path`, the download folder.
            hdfs_path: fsspec URL of a step directory, or of a folder of them.
            del_local_after_load: Delete the copy that this call downloaded; needs `hdfs_path`.

        Raises:
            IncompleteCheckpointError: If there is no manifest.
            DamagedCheckpointError: If a file is missing or its checksum differs.
            CheckpointError: If a model with other parameters or shapes wrote it. No weight has
                changed then.
        """
        self.finish_saving()
        checkpoint.load_engine_checkpoint(
            self,
            local_path=local_path,
            remote_url=hdfs_path,
            delete_download=del_local_after_load,
            gather=self._gather_objects,
        )

    # Helpers of the methods above.

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
                f"can't enter {mode}_mode() inside {self._mode}_mode(): exit the outer context first."
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
                "can't run a backward pass inside disable_adapter(), which computes the reference "
                "policy: exit the context first."
            )
        if self._mode is None or (self._mode == "eval" and not forward_only):
            context = "train_mode() or eval_mode()" if forward_only else "train_mode()"
            raise EngineStateError(
                f"a {'forward' if forward_only else 'backward'} pass needs `with engine.{context}`."
            )
        if not forward_only and self._gradients in (GradientState.REDUCED, GradientState.APPLIED):
            raise EngineStateError(
                "the gradients of this update are already reduced: call optimizer_zero_grad() before "
                "the next update, and pass final=False to all calls of an update but the last."
            )

    def _require_objective(self, batch: SequenceBatch) -> Objective:
        if self._objective is None:
            raise EngineStateError(
                "forward_backward_batch() needs an Objective: call set_loss_fn() first."
            )
        missing = self._objective.columns - batch.columns.keys() - batch.sequence_columns.keys()
        if missing:
            raise EngineStateError(
                f"objective {self._objective.name!r} needs columns that the batch does not have: "
                f"{sorted(missing)}. Add them with batch.with_columns()."
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


def _find_precision_capabilities(precision: PrecisionSpec) -> set[Capability]:
    is_other = (precision.parameters, precision.reduce, precision.buffers) != ("fp32",) * 3
    return ({Capability.FP16} if precision.compute == "fp16" else set()) | (
        {Capability.OTHER_DTYPES} if is_other else set()
    )


def _objective_loss(
    objective: Objective, *, denominators: Denominators, metrics: list[Mapping[str, Metric]]
) -> MicroBatchLoss:
    def compute_loss(head_outputs: HeadOutputs, micro: SequenceBatch) -> Tensor:
        terms: LossTerms = objective(head_outputs, micro)
        loss = reduce_loss(
            terms, micro, denominators=denominators, aggregation=objective.aggregation
        )
        metrics.append({"loss": Metric(value=loss.detach(), reduction="sum"), **terms.metrics})
        return loss

    return compute_loss
