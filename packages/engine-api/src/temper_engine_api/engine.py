"""Base class of training engines.

A trainer calls the public methods, implemented here once for all engines. An engine
implements the abstract methods at the end of the class, and names its configuration class and its
capabilities. Order of calls: `init_model`, `set_loss_fn`, then for each update
`optimizer_zero_grad`, forward and backward passes, `optimizer_step`, `lr_scheduler_step`. Gradients
are reduced across ranks exactly once per update.

An exception in a training call marks the update as failed. Call `optimizer_zero_grad` to discard it
with `_discard_update` and to start the next one; other training calls raise until then.
`rank_failures` describes how the other ranks learn of the exception.
"""

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, TypeVar, overload

import torch
from torch import Tensor

from temper_engine_api import checkpoint
from temper_engine_api.batch import PackedBatch, SequenceBatch, concatenate
from temper_engine_api.capabilities import Capability, find_required_capabilities
from temper_engine_api.distributed.process_group import report_failed_start
from temper_engine_api.distributed.rank_connections import (
    connect_groups,
    list_background_connections,
)
from temper_engine_api.distributed.rank_failures import RankFailures
from temper_engine_api.distributed.reported_calls import ReportedCalls
from temper_engine_api.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    EngineStateError,
    RankFailedError,
    WeightError,
)
from temper_engine_api.hooks import (
    DEFAULT_OUTPUT,
    Context,
    HookedStep,
    LossFn,
    PostprocessFn,
    Predictions,
    PreprocessFn,
    RawBatch,
    pack_single_micro_batch,
)
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import (
    ROUTED_EXPERTS,
    HeadOutput,
    HeadOutputs,
    MicroBatchLoss,
    Objective,
)
from temper_engine_api.outputs import (
    ForwardOutputs,
    StepResult,
    build_step_result,
    gather_outputs,
)
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import ObjectiveLoss, count_denominators
from temper_engine_api.schedule import compute_learning_rate
from temper_engine_api.specs import EngineConfig, OptimizerSpec
from temper_engine_api.topology import Topology
from temper_engine_api.updates import GradientState, LossScale, UpdateCycle, UpdateReport
from temper_engine_api.weights import NamedWeight, StateStream, TrainingState, WeightStream

ObjectT = TypeVar("ObjectT")


class BaseEngine(ReportedCalls, ABC):
    """One rank of a training engine. The constructor does no I/O and creates no process group."""

    config_class: ClassVar[type[EngineConfig]]
    """Frozen dataclass with the engine's settings."""
    capabilities: ClassVar[frozenset[Capability]]
    """Capabilities that the engine claims."""

    def __init__(self, config: EngineConfig) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__} got a {type(config).__name__}, but needs a "
                f"{self.config_class.__name__}."
            )
        self.config = config
        self._topology: Topology | None = None
        self._was_initialized = False
        self._objective: Objective | None = None
        self._loss_fn: LossFn | None = None
        self._loss_fn_outputs: frozenset[HeadOutput] = frozenset()
        self._mode: Literal["train", "eval"] | None = None
        self._is_adapter_disabled = False
        self._update_cycle = UpdateCycle(config.precision)
        self._rank_failures: RankFailures | None = None
        self._background_failures: RankFailures | None = None
        self._background_save: checkpoint.BackgroundSave[str] | None = None
        self._background_part: checkpoint.BackgroundSave[checkpoint.PartReport] | None = None

    @classmethod
    def check_model(cls, config: EngineConfig) -> None:
        """Check that model, adapter and optimizer can be built, without weights or process groups.

        `temper-train --check` calls it, on a machine that may have no accelerator. The default
        checks nothing. An override raises the same errors as `init_model`.

        Raises:
            ConfigError: If the architecture is invalid, the adapter names no module of it, or the
                optimizer takes other arguments.
            CapabilityError: If the engine does not support the model or the optimizer.
        """
        return

    def init_model(self) -> None:
        """Build the model, optimizer and process groups. Collective.

        If it raises on one rank only, the other ranks raise RankFailedError, at the latest in their
        next call.

        Raises:
            CapabilityError: If the configuration needs a capability that the engine does not claim.
            EngineStateError: If it was called before, even if the engine was closed since.
            RankFailedError: If another rank raised.
        """
        if self._was_initialized:
            raise EngineStateError(
                "init_model() was called before, and an engine is initialized only once: construct "
                "another one."
            )
        # Parameters created in inference mode can never be trained.
        is_inference = torch.is_inference_mode_enabled()
        with (
            torch.inference_mode(mode=False) if is_inference else nullcontext(),
            report_failed_start(timeout_s=self.config.collective_timeout_s) as start,
        ):
            self.require(*find_required_capabilities(self.config))
            topology = self._build()
            # For engines that create their process group without join_default_group.
            start.failures = start.failures or RankFailures.join()
            if start.failures is not None:
                self._meet_other_ranks(start.failures)
                start.failures.mark_engine_built(topology)
        self._topology, self._rank_failures = topology, start.failures
        self._was_initialized = True

    def _meet_other_ranks(self, failures: RankFailures) -> None:
        try:
            # Report before close() destroys the groups: a report counts their collectives and, with
            # NCCL, aborts them.
            with failures.report_failure("init_model()"):
                # Wait first, because a rank can't learn of a failure while it is connecting.
                failures.wait_for_arrivals("build", timeout_s=self.config.collective_timeout_s)
                self._connect_ranks()
        except BaseException:
            self.close()
            raise

    @property
    def topology(self) -> Topology:
        """Sizes and ranks of the parallel axes.

        Raises:
            EngineStateError: If `init_model` was not called.
        """
        if self._topology is None:
            raise EngineStateError("the engine has no topology yet: call init_model() first.")
        return self._topology

    @property
    def model_type(self) -> str:
        """'language_model', 'value_model' or 'reward_model'."""
        return self.config.model.model_type

    @property
    def objective(self) -> Objective | None:
        """Objective set with `set_loss_fn`; None if it is a plain function."""
        return self._objective

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
                is averaged across data-parallel ranks, and calls before a step add up. With a plain
                function the gradient may depend on how the mini-batch is split.
            required_outputs: Outputs that a plain function needs. By default a language model's
                log-probs, a value model's values or a reward model's scores.

        Raises:
            ConfigError: If `required_outputs` is given for an Objective.
        """
        if isinstance(loss, Objective):
            if required_outputs is not None:
                raise ConfigError(
                    "required_outputs has no effect with an Objective, which has its own: "
                    "remove it."
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
        """Enter training mode and load what it needs; gradients are kept on exit.

        If an exception leaves the body between two training calls of an update, its gradients are
        incomplete: `optimizer_step` raises until they are zeroed. If one rank raises in the body,
        the others raise RankFailedError.
        """
        with self._enter_mode("train"):
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Enter evaluation mode (no dropout) and load the parameters only.

        If one rank raises in the body, the others raise RankFailedError.
        """
        with self._enter_mode("eval"):
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
            EngineStateError: If called outside a mode, after the final call of this update, after
                a call of this update that raised, or without an objective that is needed.
            RankFailedError: If another rank raised, which broke the process group.
        """
        self._check_can_run(forward_only=forward_only)
        requested = frozenset(outputs)
        loss: ObjectiveLoss | None = None
        if not (forward_only and requested):
            if self._objective is None:
                raise EngineStateError(
                    "forward_backward_batch() needs an Objective: call set_loss_fn() first."
                )
            loss = ObjectiveLoss(self._objective, batch=batch)
        with self._record_call(forward_only=forward_only, final=final):
            head_outputs = self._run_passes(
                batch,
                requested_outputs=requested | (loss.required_outputs if loss else frozenset()),
                micro_batch_loss=loss,
                forward_only=forward_only,
                final=final,
            )
            metrics = [*(loss.metrics if loss else ()), self._collect_metrics()]
            return build_step_result(
                batch,
                head_outputs=head_outputs if self.topology.returns_outputs else None,
                requested=requested,
                metrics=metrics,
            )

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
        loss = self._loss_fn if self._objective is None else self._objective
        if loss is None and not forward_only:
            raise EngineStateError("there is no loss function: call set_loss_fn() before training.")
        # This interface does not mark the last call, so optimizer_step reduces the gradients.
        with self._record_call(forward_only=forward_only, final=False):
            if preprocess_fn is not None:
                batch, ctx = preprocess_fn(batch, ctx)
            packed = pack_single_micro_batch(
                batch,
                constraints=self.topology.plan_constraints,
                sum_over_ranks=self._sum_over_data_parallel,
            )
            step = HookedStep(
                loss,
                packed=packed,
                ctx=ctx,
                postprocess=postprocess_fn,
                dp_size=self.topology.dp.size,
            )
            default = frozenset({DEFAULT_OUTPUT[self.config.model.model_type]})
            head_outputs = self._run_passes(
                packed,
                requested_outputs=self._loss_fn_outputs or default
                if self._objective is None
                else self._objective.required_outputs,
                micro_batch_loss=None if forward_only else step.compute_loss,
                forward_only=forward_only,
                final=False,
            )
            # All ranks of a replica compute the same predictions, so only one rank returns them.
            returns_outputs = head_outputs is not None and self.topology.returns_outputs
            if forward_only:
                predictions = step.postprocess_outputs(head_outputs)
                return (predictions if returns_outputs else None), step.ctx
            # A rank's total is its contribution to the mean, so sum across ranks to get the loss.
            value = self._sum_over_data_parallel(step.total)
            return (step.predictions if returns_outputs else None), value, step.ctx

    def optimizer_zero_grad(self) -> None:
        """Reset gradients and start an update.

        If a call of the last update raised an exception, this also discards the call's gradients
        and other effects. The next update then gives the same result as without the failed update,
        except that dropout has used random numbers.

        Raises:
            RankFailedError: If a rank raised and the process group did not survive.
        """
        self._start_update()

    def optimizer_step(self) -> float:
        """Reduce pending gradients, clip them, and update the parameters.

        If a gradient on any rank is not finite, or the mini-batch trains no token, all ranks skip
        the update: weights, optimizer states and learning rate stay as they are, and `last_update`
        has the reason.

        Returns:
            The global gradient norm before clipping.

        Raises:
            EngineStateError: If there are no gradients or no optimizer, if a call of this update
                raised, or after more than `optimizer.max_consecutive_skips` non-finite updates in a
                row.
            RankFailedError: If another rank raised, which broke the process group.
        """
        optimizer, cycle = self._require_optimizer(), self._update_cycle
        self._check_records_gradients()
        # Raise errors of a background save before the update, so that the update can be repeated.
        self._raise_background_error()
        cycle.check_can_step()
        with self._loaded("update"):
            if cycle.has_unreduced_gradients:
                with cycle.record_training_call(result=GradientState.REDUCED):
                    self._reduce_pending_gradients()
            # Record this separately, because only exceptions in here can leave changed parameters.
            with cycle.record_training_call(result=GradientState.APPLIED):
                norm = self._apply_gradients(lr=self.current_lr) if cycle.trains_something else 0.0
            # Finish before offloading: if that raises, the parameters have changed already.
            cycle.finish(norm, max_consecutive_skips=optimizer.max_consecutive_skips)
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule unless the last update was skipped; return the next rate.

        Raises:
            EngineStateError: If `init_model` was not called, or a call of this update raised.
        """
        if self._topology is None:
            raise EngineStateError("lr_scheduler_step() needs a model: call init_model() first.")
        self._update_cycle.check_not_failed()
        # A skipped update did not change the weights, so use the same rate for the next one.
        if self.last_update is None or self.last_update.outcome == "stepped":
            self.num_schedule_steps += 1
        return self.current_lr

    @property
    def current_lr(self) -> float:
        """Learning rate of the next update."""
        if self.config.optimizer is None:
            return 0.0
        return compute_learning_rate(
            self.num_schedule_steps, peak=self.config.optimizer.lr, spec=self.config.schedule
        )

    @property
    def last_update(self) -> UpdateReport | None:
        """Result of the last `optimizer_step`; None before it and after loading a checkpoint."""
        return self._update_cycle.last_update

    @property
    def num_updates(self) -> int:
        """Number of updates that changed the parameters."""
        return self._update_cycle.num_updates

    @property
    def num_nonfinite_updates(self) -> int:
        """Number of updates that were skipped because a gradient was not finite."""
        return self._update_cycle.num_nonfinite_updates

    @property
    def num_schedule_steps(self) -> int:
        """Number of completed learning-rate schedule steps."""
        return self._update_cycle.num_schedule_steps

    @num_schedule_steps.setter
    def num_schedule_steps(self, value: int) -> None:
        self._update_cycle.num_schedule_steps = value

    @property
    def loss_scale(self) -> LossScale:
        """Loss scale of fp16; its value is 1 with other compute dtypes."""
        return self._update_cycle.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: LossScale) -> None:
        self._update_cycle.loss_scale = value

    def shard_data(
        self, batch: SequenceBatch, *, max_tokens: int | None = None, seed: int = 0
    ) -> PackedBatch:
        """Plan a mini-batch and return this rank's packed batch, without communication.

        Args:
            batch: The full mini-batch, the same on every rank.
            max_tokens: Token cap per micro-batch; None puts all tokens of a rank into one, unless
                the parallel layout needs several.
            seed: Seed for the objective's `prepare`.
        """
        topology = self.topology
        if self._objective is not None:
            # Prepare before dividing the batch, because mini-batch statistics need all samples.
            batch = batch.with_columns(self._objective.prepare(batch, seed=seed))
        plan = plan_mini_batch(
            batch.lengths.tolist(),
            pack_group_ids=batch.pack_group_ids.tolist(),
            dp_size=topology.dp.size,
            max_tokens=sys.maxsize if max_tokens is None else max_tokens,
            constraints=topology.plan_constraints,
        )
        return build_packed_batch(
            batch, plan=plan, rank=topology.dp.rank, denominators=count_denominators(batch)
        )

    def unshard_data(
        self, part: SequenceBatch, *, sample_ids: Tensor | None = None
    ) -> SequenceBatch:
        """Gather the mini-batch of all data-parallel ranks to every rank. Collective.

        Dummy sequences are left out.

        Args:
            part: This rank's sequences.
            sample_ids: [B] ids in the order to return; None sorts by id.
        """
        kept = (
            part.select(torch.nonzero(~part.is_dummy)[:, 0])
            if bool((~part.is_dummy).any())
            else None
        )
        # All ranks of a replica have the same samples, so only one rank contributes.
        local = kept if self.topology.returns_outputs else None
        full = concatenate([p for p in self.gather_objects(local) if p is not None])
        position = {sample: i for i, sample in enumerate(full.sample_ids.tolist())}
        order = sorted(position) if sample_ids is None else sample_ids.tolist()
        # Values from other ranks arrive on the CPU.
        return full.select([position[i] for i in order]).to(part.tokens.device)

    def unshard_outputs(
        self, outputs: ForwardOutputs | None, *, sample_ids: Tensor
    ) -> ForwardOutputs:
        """Gather outputs from all ranks to every rank, ordered by these ids [B]. Collective."""
        return gather_outputs(self.gather_objects(outputs), sample_ids=sample_ids)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable the adapter, so that forward passes compute the reference policy.

        Inside the context, `export_weights` returns the base model's weights, and a backward pass
        raises EngineStateError.

        Raises:
            EngineStateError: If the engine has no adapter.
        """
        self._require_adapter()
        was_disabled = self._is_adapter_disabled
        with self._disable_adapter():
            # A backward pass here would not reach the adapter; _check_can_run refuses it.
            self._is_adapter_disabled = True
            try:
                yield
            finally:
                self._is_adapter_disabled = was_disabled

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """Return the adapter's PEFT config and its full float32 tensors by PEFT name. Collective.

        Raises:
            EngineStateError: If the engine has no adapter.
        """
        self._require_adapter()
        self._update_cycle.check_parameters()
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
        with (
            self._load_to_change("eval"),
            # `_load_adapter` raises these two before it changes a tensor.
            self._update_cycle.record_load("load_adapter()", harmless=(ConfigError, WeightError)),
        ):
            self._load_adapter(config, tensors)

    def gather_objects(self, item: ObjectT) -> list[ObjectT]:
        """Gather small values from all ranks to all ranks, in rank order. Collective.

        Raises:
            MessageError: If `gather_codec.encode_value` does not support the value.
            RankFailedError: If a rank raised and the process group did not survive.
        """
        return self._gather_objects(item)

    def export_weights(self) -> WeightStream:
        """Return a stream of full tensors by Hugging Face name, in the same order on every rank.

        Use it as `with engine.export_weights() as stream`. Tensors are gathered one by one while
        the stream is read. Collective.

        If the body raises on one rank before the stream ends, the other ranks raise RankFailedError
        instead of waiting for the next tensor.

        Raises:
            EngineStateError: If a step or a load was interrupted, and nothing was loaded since.
        """
        self._update_cycle.check_parameters()
        return WeightStream(
            self._iterate_unchanged(self._iterate_weights(), mode="eval", call="export_weights"),
            scope=self._report_call("export_weights"),
        )

    def load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Load full tensors by Hugging Face name. Collective; every rank passes the same stream.

        Any other exception than WeightError may leave only some of the weights replaced. Calls that
        use the weights then raise EngineStateError until a load succeeds.

        Raises:
            WeightError: If a name is missing, unexpected or repeated, or a shape differs. No weight
                is loaded then.
        """
        with (
            self._load_to_change("eval"),
            # The conformance kit tests that a WeightError is raised before any change.
            self._update_cycle.record_load("load_weights()", harmless=(WeightError,)),
        ):
            self._load_weights(stream)

    def export_state(self) -> StateStream:
        """Return a stream of the portable training state, one parameter at a time. Collective.

        Use it as `with engine.export_state() as stream`: if the body raises on one rank before the
        stream ends, the other ranks raise RankFailedError with its message. Without `with` they
        learn only that the stream was not read to its end.

        Raises:
            EngineStateError: If a step or a load was interrupted, and nothing was loaded since.
        """
        self.require(Capability.PORTABLE_STATE)
        self._update_cycle.check_parameters()
        failures = self._rank_failures
        return StateStream(
            self._iterate_unchanged(self._iterate_state(), mode="update", call="export_state"),
            scope=self._report_call("export_state"),
            report_abandoned=None
            if failures is None
            else lambda: failures.report_abandoned("export_state()"),
        )

    def load_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the portable training state. Collective.

        An exception has the same effect as in `load_weights`.

        Raises:
            WeightError: If a name is missing, unexpected or repeated, or a shape differs. Nothing
                is loaded then.
        """
        self.require(Capability.PORTABLE_STATE)
        with (
            self._load_to_change("update"),
            # The conformance kit tests that a WeightError is raised before any change.
            self._update_cycle.record_load(
                "load_state()", completes=self._saved_loads, harmless=(WeightError,)
            ),
        ):
            self._load_state(stream)

    def write_part(self, directory: str) -> checkpoint.PartReport:
        """Write this engine's files of a checkpoint with several participants. Collective.

        Returns:
            Sizes and checksums of this rank's files, for `CheckpointTransaction.commit`.
        """
        with self._loaded("update"):
            return self._stage(self._write_state).write_part(directory)

    def stage_part(self, directory: str) -> None:
        """Copy the state to host memory and write it like `write_part` while training continues.

        Collective; needs BACKGROUND_SAVE. Call `finish_part` before the next `stage_part`.

        Raises:
            EngineStateError: If the previous `stage_part` was not finished.
        """
        self.require(Capability.BACKGROUND_SAVE)
        if self._background_part is not None:
            raise EngineStateError(
                f"can't stage a part in {directory}: the previous one is still being written: call "
                "finish_part() first."
            )
        self.finish_saving()
        staged = self._stage_copy()
        self._background_part = checkpoint.BackgroundSave(
            lambda: staged.write_part(directory), path=Path(directory)
        )

    @property
    def has_written_part(self) -> bool:
        """True if `finish_part` would not block on this rank."""
        return self._background_part is None or self._background_part.is_done

    def finish_part(self) -> checkpoint.PartReport:
        """Wait for `stage_part` and return its report of this rank's files. Collective.

        Raises:
            EngineStateError: If no part was staged.
        """
        save = self._background_part
        if save is None:
            raise EngineStateError(
                "no part is being written: call stage_part() before finish_part()."
            )
        save.wait()
        self._background_part = None  # after the wait, which Ctrl-C may interrupt
        return save.finish()

    def read_part(self, directory: str) -> None:
        """Load the files of `write_part` or `stage_part`, and reset gradients. Collective."""
        with (
            self._load_to_change("update"),
            # `_read_state` raises CheckpointError before it changes a tensor.
            self._update_cycle.record_load(
                "load_checkpoint()", completes=self._saved_loads, harmless=(CheckpointError,)
            ),
        ):
            self._read_state(directory)
        self._update_cycle.load_state_dict(
            checkpoint.read_json(directory, checkpoint.PROGRESS_FILE)
        )
        # Gradients of the old weights are useless now. optimizer_zero_grad() can't be used here: it
        # counts as a call, and a rank that failed to read does not get here to make it.
        self._start_update()

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
        while training continues. A save first waits for the previous one, so only the last one can
        be uncommitted. If it fails, the next `optimizer_step`, save, load, `finish_saving` or
        `close` raises its error.

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
        save = partial(
            checkpoint.save_engine_checkpoint,
            local_path=local_path,
            remote_url=hdfs_path,
            step=global_step,
            max_to_keep=max_ckpt_to_keep,
        )
        if not in_background:
            return save(self, gather=self.gather_objects)
        self.require(Capability.BACKGROUND_SAVE)
        path = checkpoint.step_directory(local_path, global_step)
        staged = self._stage_copy()

        def save_copy() -> str:
            with self._report_in_background("save_checkpoint()"):
                return save(staged, gather=self._gather_in_background)

        self._background_save = checkpoint.BackgroundSave(save_copy, path=path)
        return str(path)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a checkpoint on all ranks together, from a step directory or a folder with several.

        Args:
            local_path: Step directory, or a folder whose latest complete step is loaded; with
                `hdfs_path`, the download folder.
            hdfs_path: fsspec URL of a step directory, or of a folder of them.
            del_local_after_load: Delete the copy that this call downloaded; needs `hdfs_path`.

        Raises:
            IncompleteCheckpointError: If there is no manifest.
            DamagedCheckpointError: If a file is missing or its checksum differs.
            CheckpointError: If a model with other parameters or shapes wrote it. The
                weights are unchanged in this case.
        """
        self.finish_saving()
        checkpoint.load_engine_checkpoint(
            self,
            local_path=local_path,
            remote_url=hdfs_path,
            delete_download=del_local_after_load,
            gather=self.gather_objects,
        )

    def finish_saving(self) -> None:
        """Wait for background saves, including those from `stage_part`. Collective.

        Raises:
            CheckpointError: If the save failed; earlier steps are unchanged.
            RankFailedError: If a rank raised between two collectives of the save. Earlier steps are
                unchanged, but this engine can't save in the background any more.
        """
        if self._background_part is not None:
            self._background_part.wait()
        save = self._background_save
        if save is not None:
            save.wait()
            self._background_save = None  # after the wait, which Ctrl-C may interrupt
            save.finish()

    # Methods that an engine implements.

    @abstractmethod
    def _build(self) -> Topology:
        """Build the model and optimizer, load weights, and join or create the process group."""

    def _connect_ranks(self) -> None:
        """Open connections between ranks that NCCL would otherwise open at first use. Collective.

        `init_model` calls it when all ranks have built their engine. Override it to also connect
        ranks that exchange messages outside of collectives.
        """
        connect_groups()

    @abstractmethod
    def _run_micro_batches(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[HeadOutputs] | None:
        """Run the forward pass, and the backward pass unless `forward_only`, of each micro-batch.

        An exception in a forward-only call must keep the accumulated gradients, so that training
        can continue. After an exception in training, the base class calls `_discard_update`.

        Args:
            batch: This rank's micro-batches, on any device.
            requested_outputs: Outputs that the head must compute. In training only trained
                positions are needed, otherwise all positions with a predecessor.
            micro_batch_loss: Scalar to differentiate, or with `forward_only` to evaluate; None
                computes no loss.
            forward_only: Run without gradients and dropout.
            reduce_gradients: Reduce gradients over ranks after the last micro-batch; otherwise they
                stay local and accumulate.

        Returns:
            Detached outputs of each micro-batch, or None on ranks that do not have them. Ranks may
            return duplicates; the base class keeps those of ranks with `topology.returns_outputs`.
        """

    def _check_routed_experts(self, batch: PackedBatch) -> None:
        """Check the column `ROUTED_EXPERTS` of a batch before `_run_micro_batches`.

        Call `objective.check_routed_experts` with the sizes of the model. Required for
        ROUTING_REPLAY.

        Raises:
            BatchError: If the model cannot replay them.
        """
        raise NotImplementedError

    def _collect_metrics(self) -> Mapping[str, Metric]:
        """Return engine metrics of the last call, such as `memory/allocated_gib`; empty by default.

        Use `metrics.LazyMetrics` for values that block on the device, so that the host can run
        ahead until they are read.
        """
        return {}

    @abstractmethod
    def _reduce_pending_gradients(self) -> None:
        """Sum accumulated local gradients across ranks."""

    @abstractmethod
    def _apply_gradients(self, *, lr: float) -> float:
        """Clip gradients and update the parameters; return the global norm before clipping.

        The norm is computed in float32 and is the same on every rank. If it is not finite, change
        no parameter and no optimizer state. An engine that supports FP16 multiplies the loss by
        `loss_scale.value` before the backward pass and divides the gradients by it here, before
        the norm.
        """

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Set gradients to zero or None."""

    def _discard_update(self) -> None:
        """Drop everything that a call of `_run_micro_batches` left behind when it raised.

        The default calls `_zero_gradients`. Override it to also clear gradients outside of `.grad`,
        such as buffers or unreduced sums, and state of the pass that a framework keeps. The next
        update must then equal that of a run without the exception, bit for bit, except for random
        numbers. Not collective: it may run on a single rank.
        """
        self._zero_gradients()

    @abstractmethod
    def _loaded(self, mode: Literal["train", "eval", "update"]) -> AbstractContextManager[None]:
        """Load the offloaded state that a mode needs; offload it again on exit or an exception.

        A nested entry must not copy anything.
        """

    @abstractmethod
    def _iterate_weights(self) -> Iterator[NamedWeight]:
        """Iterate over full tensors in float32 or the compute dtype, buffers in their own.

        Collective. The order is the same on all ranks.
        """

    @abstractmethod
    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Load full tensors; raise WeightError for missing and unexpected names and wrong shapes.

        Raise it before any weight changes. Collective.
        """

    @abstractmethod
    def _iterate_state(self) -> Iterator[TrainingState]:
        """Iterate over the portable training state. Collective."""

    @abstractmethod
    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the portable training state; raise WeightError for missing and unexpected names.

        Raise it before anything changes. Collective.
        """

    @abstractmethod
    def _write_state(self, directory: str) -> list[str]:
        """Write parameters, persistent buffers, optimizer states and RNG states. Collective.

        If only this rank fails, for example because its disk is full, run the remaining collectives
        before raising: the ranks then gather their errors, and the group survives. Raise interrupts
        and out-of-memory errors at once.

        Returns:
            Paths of the files that this rank wrote, relative to the directory.
        """

    def _stage_state(self) -> Callable[[str], list[str]]:
        """Copy the state to host memory and return a function that writes the copy. Collective.

        The function behaves like `_write_state`, but runs on another thread while the engine
        trains. It must not use the engine or the engine's process groups. Required for
        BACKGROUND_SAVE.
        """
        raise NotImplementedError

    def _gather_in_background(self, item: ObjectT) -> list[ObjectT]:
        """Gather like `_gather_objects`; called on the saving thread of every rank.

        Required for BACKGROUND_SAVE.
        """
        raise NotImplementedError

    @abstractmethod
    def _read_state(self, directory: str) -> None:
        """Read the files of `_write_state`, written with this or another layout. Collective.

        If only this rank fails to read, run the remaining collectives first, as in `_write_state`.
        """

    @abstractmethod
    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        """Sum a value across data-parallel ranks; every rank gets the result.

        With pipeline parallelism only the last stage has the loss; the others get its value too.
        """

    @abstractmethod
    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        """Gather small values from all ranks to all ranks, in rank order.

        With a process group, return `process_group.gather_objects(item)`. Do not use the object
        collectives of torch.distributed: they unpickle what arrives.
        """

    @abstractmethod
    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        """Offload parameters and gradients, or optimizer states, or load them, until the next call.

        Modes load what they need and restore the placement afterwards. An engine calls
        `_check_can_move` first.

        Args:
            device: "cpu" offloads, "device" loads.
            model: Move parameters and gradients.
            optimizer: Move optimizer states.

        Raises:
            ConfigError: If the device is not one of the two names.
            EngineStateError: If called inside a mode.
        """

    @abstractmethod
    def close(self) -> None:
        """Free memory and destroy the process groups that this engine created; idempotent.

        `init_model` calls it if the other ranks failed, and then the owner of the engine may call
        it again. Another engine may be built in the same process afterwards.
        """

    def _disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the context; may be nested. Required for ADAPTER."""
        raise NotImplementedError

    def _export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """Return the PEFT config and full float32 tensors by PEFT name. Required for ADAPTER."""
        raise NotImplementedError

    def _load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Load adapter tensors; refuse missing and unexpected names. Required for ADAPTER."""
        raise NotImplementedError

    # Helpers of the methods above.

    def _run_passes(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        final: bool,
    ) -> list[HeadOutputs] | None:
        returns_experts = HeadOutput.ROUTED_EXPERTS in requested_outputs
        if returns_experts and not forward_only:
            raise EngineStateError(
                f"output {HeadOutput.ROUTED_EXPERTS.value!r} was requested in training, but only "
                "forward-only calls return it: request it in eval_mode()."
            )
        if returns_experts or ROUTED_EXPERTS in batch.columns:
            self.require(Capability.ROUTING_REPLAY)
        if ROUTED_EXPERTS in batch.columns:
            # Before the passes: with pipeline stages, an exception inside them breaks the group.
            self._check_routed_experts(batch)
        run = partial(
            self._run_micro_batches,
            batch,
            requested_outputs=requested_outputs,
            micro_batch_loss=self._prepare_loss(micro_batch_loss, num=batch.num_micro_batches),
            forward_only=forward_only,
        )
        failures = self._rank_failures
        passes = nullcontext() if failures is None else failures.track_messages()
        if forward_only:
            # Leave inference mode, because an engine may keep tensors for the next backward pass,
            # such as FSDP2's gathered parameters, and backward passes can't use inference tensors.
            # Don't enter inference_mode(False) otherwise: it also enables gradients.
            is_inference = torch.is_inference_mode_enabled()
            leaves = torch.inference_mode(mode=False) if is_inference else nullcontext()
            with leaves, passes:
                return run(reduce_gradients=False)
        self._require_optimizer()
        # A plain function may give a gradient to a batch without trained tokens.
        are_trained = self._loss_fn is not None or not batch.denominators.is_empty
        self._update_cycle.record_samples(batch.sample_ids, are_trained=are_trained)
        with passes:
            return run(reduce_gradients=final)

    def _prepare_loss(
        self, micro_batch_loss: MicroBatchLoss | None, *, num: int
    ) -> MicroBatchLoss | None:
        """Wrap the loss to note the current micro-batch for error messages.

        The wrapper's result can always be differentiated.
        """
        failures = self._rank_failures
        if micro_batch_loss is None:
            return None
        positions = itertools.count(1)

        def compute_loss(head_outputs: HeadOutputs, micro: SequenceBatch) -> Tensor:
            if failures is not None:
                # An aborted collective leaves wrong outputs.
                failures.check()
                failures.set_position(f" at micro-batch {next(positions)} of {num}")
            return head_outputs.connect(micro_batch_loss(head_outputs, micro))

        return compute_loss

    @property
    def _saved_loads(self) -> frozenset[str]:
        """Interrupted calls that loading the training state repairs: it has all their tensors."""
        # With an adapter the state has no base weights, so loading it can't repair them.
        base = () if self.config.lora.is_enabled else ("load_weights()",)
        state = ("optimizer_step()", "load_state()", "load_checkpoint()", "load_adapter()")
        return frozenset((*state, *base))

    def _start_update(self) -> None:
        if self._update_cycle.has_failed:
            self._discard_update()
        else:
            # An exception leaves some gradients zeroed and others not, so none may be applied.
            with self._update_cycle.record_training_call(result=GradientState.EMPTY):
                self._zero_gradients()
        self._update_cycle.start()

    def _record_call(self, *, forward_only: bool, final: bool) -> AbstractContextManager[None]:
        """Enclose a forward or training call, and record its gradients.

        It encloses the entire call, not only the passes. After an exception the caller has no
        result and may repeat the call, which would add the same gradients twice.
        """
        if forward_only:
            return nullcontext()
        result = GradientState.REDUCED if final else GradientState.ACCUMULATED
        return self._update_cycle.record_training_call(result=result)

    def _stage(self, write: Callable[[str], list[str]]) -> checkpoint.StagedEngine:
        self._update_cycle.check_parameters()
        return checkpoint.StagedEngine(
            config=self.config,
            topology=self.topology,
            write=write,
            progress=self._update_cycle.state_dict(),
        )

    def _stage_copy(self) -> checkpoint.StagedEngine:
        """Copy the state to host memory for a saving thread, which reports a failed write."""
        failures, connections = self._rank_failures, list_background_connections()
        if self._background_failures is not None:
            try:
                self._background_failures.check_store()
            except RankFailedError as error:
                # Reported to the other ranks, as a RankFailedError would not be.
                raise EngineStateError(str(error)) from error
        with self._loaded("update"):
            staged = self._stage(self._stage_state())
        if failures is not None and self._background_failures is None:
            self._background_failures = failures.join_in_background(
                list_background_connections() - connections
            )

        def write(directory: str) -> list[str]:
            # Also inside save_checkpoint(), which otherwise gathers the error next, while another
            # rank may wait in a collective of this write.
            with self._report_in_background("the write"):
                return staged.write(directory)

        return replace(staged, write=write)

    def _report_in_background(self, call: str) -> AbstractContextManager[None]:
        failures = self._background_failures
        if failures is None:
            return nullcontext()
        return failures.report_unfinished(
            f"{call} of a background save", timeout_s=self.config.collective_timeout_s
        )

    def _raise_background_error(self) -> None:
        # Ask all ranks whether the save has ended. If `finish` raised on one rank only, the others
        # would wait for its gradients.
        save = self._background_save
        if save is not None and all(self.gather_objects(save.is_done)):
            self._background_save = None
            save.finish()

    @contextmanager
    def _enter_mode(self, mode: Literal["train", "eval"]) -> Iterator[None]:
        if self._mode is not None:
            raise EngineStateError(
                f"can't enter {mode}_mode() inside {self._mode}_mode(): exit the outer context "
                "first."
            )
        with self._loaded(mode):
            self._mode = mode
            try:
                yield
            except GeneratorExit:
                # Not an error: a generator that entered the mode was closed early.
                raise
            except BaseException as error:
                if mode == "train":
                    self._update_cycle.interrupt(error)
                raise
            finally:
                self._mode = None

    def _require_optimizer(self) -> OptimizerSpec:
        if self.config.optimizer is None:
            raise EngineStateError(
                "this engine has no optimizer (optimizer: null) and can't train: configure one."
            )
        return self.config.optimizer

    def _require_adapter(self) -> None:
        self.require(Capability.ADAPTER)
        if not self.config.lora.is_enabled:
            raise EngineStateError(
                "this engine has no adapter: set lora.rank and lora.alpha, or lora.path."
            )

    def _check_can_move(self, device: str) -> None:
        """Check the argument of `to`, and that the engine is outside a mode; for engines.

        Raises:
            ConfigError: If the device is not one of the two names.
            EngineStateError: If it is called inside a mode.
        """
        if device not in ("cpu", "device"):
            raise ConfigError(
                f"to({device!r}) is no location: use 'cpu' to offload, or 'device' to load to the "
                "accelerator of the configuration."
            )
        if self._mode is not None:
            raise EngineStateError(
                f"to({device!r}) was called inside {self._mode}_mode(): exit the mode first."
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
        self._update_cycle.check_parameters()
        if not forward_only:
            self._check_records_gradients()
            self._update_cycle.check_can_accumulate()

    def _check_records_gradients(self) -> None:
        if torch.is_inference_mode_enabled():
            raise EngineStateError(
                "can't train inside torch.inference_mode(), in which no gradient can be computed: "
                "exit it first."
            )

    def _iterate_unchanged(
        self, items: Iterator[ObjectT], *, mode: Literal["eval", "update"], call: str
    ) -> Iterator[ObjectT]:
        """Iterate over tensors that are loaded for a mode, until a step or load changes them."""
        num_changes = self._update_cycle.num_weight_changes
        with self._loaded(mode):
            for item in items:
                # The receiver would get a mix of old and new weights.
                if self._update_cycle.num_weight_changes != num_changes:
                    raise EngineStateError(
                        f"the weights were updated while {call}() was read: read the stream to "
                        "its end before optimizer_step() or a call that loads weights."
                    )
                yield item

    @contextmanager
    def _load_to_change(self, mode: Literal["eval", "update"]) -> Iterator[None]:
        """Enclose a call that replaces weights or the training state."""
        # Count before the call, because a call that raises may have changed some weights.
        self._update_cycle.num_weight_changes += 1
        with self._loaded(mode):
            yield
