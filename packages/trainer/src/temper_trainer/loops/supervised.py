"""Supervised stages: train on demonstrations or preferences, and write a model.

A stage is either a run of its own (tasks sft, dpo and rm) or the warm start of an RL run.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from temper_engine_api.objective import Objective
from temper_engine_api.specs import EngineConfig
from temper_trainer.algorithms.objectives.objective_factory import build_pair_objective
from temper_trainer.algorithms.objectives.supervised_losses import SftObjective
from temper_trainer.algorithms.preference_losses.preference_loss import ReferenceSource
from temper_trainer.batching.step_plan import pack_mini_batch
from temper_trainer.checkpoint.checkpoint_writer import CheckpointWriter
from temper_trainer.checkpoint.checkpointer import Checkpointer
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.data import DataConfig
from temper_trainer.config.run import PREFERENCE_TASKS, RoleConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.loss_weights import describe_missing_weights
from temper_trainer.data.prompts import check_fits, encode_demonstrations, encode_preferences
from temper_trainer.data.rows import DataError, PreferenceRow, Row
from temper_trainer.data.sources import iterate_rows
from temper_trainer.data.streams import (
    BufferedStream,
    Curriculum,
    InMemoryStream,
    get_difficulty,
    measure_difficulty,
)
from temper_trainer.data.tokenizer import compute_tokenizer_digest
from temper_trainer.loops.example_batches import (
    TrainingExample,
    count_tokens,
    list_members,
    prepare_samples,
)
from temper_trainer.loops.held_out import HeldOutEvaluator, HeldOutSet
from temper_trainer.loops.rl_step import collect_update_metrics
from temper_trainer.loops.run.interrupts import StopRequest, WorkAbandoned
from temper_trainer.loops.run.run_folder import RunFolder, export_model
from temper_trainer.loops.run.run_setup import (
    get_demonstration_limit,
    open_checkpointer,
    report_dropped,
    with_run_length,
    with_schedule_length,
)
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.loops.run.step_boundary import StepBoundary
from temper_trainer.metrics.run_files import WARM_START_PHASE
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.runtime.runtime_factory import Runtime
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.types import DataCursor


class ExampleStream(Protocol):
    """An endless stream of examples; see ``InMemoryStream`` and ``BufferedStream``."""

    @property
    def cursor(self) -> DataCursor:
        """Position of the next example."""
        ...

    def take(self, count: int) -> list[TrainingExample]:
        """Return the next ``count`` examples."""
        ...

    def take_within(
        self, limit: int, *, size_of: Callable[[TrainingExample], int]
    ) -> list[TrainingExample]:
        """Return the next examples whose total size is within the limit; at least one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedStage:
    """Definition of a supervised stage: what it trains, on which data, and for how long."""

    phase: Literal["sft", "dpo", "rm", "warm_start"]
    """Name of the stage in the log and in checkpoints."""
    engine: EngineConfig
    """The actor's engine, with the optimizer and schedule of the stage."""
    open_stream: Callable[[DataCursor], ExampleStream]
    """Opens the training examples at a position."""
    objective: Objective
    reference: ReferenceSource = "none"
    """Source of the reference log-probs that the objective reads."""
    tokens_per_update: int | None = None
    """Maximum number of tokens in an update; None uses ``batch_size``."""
    total_steps: int
    """Number of updates, one per step."""
    batch_size: int
    """Number of examples in an update, if ``tokens_per_update`` is None."""
    folder: RunFolder
    """Folder for checkpoints and model."""
    resume_from: Path | None
    """Checkpoint to resume from; None starts at step 1."""
    exports_model: bool = True
    """True if the stage writes a Hugging Face model directory at its end."""
    held_out: Sequence[HeldOutSet] = ()
    """Examples on which the stage is evaluated before its first and after its last step."""
    eval_every: int = 0
    """Steps between further evaluations; 0 is off."""


def build_demonstration_stage(
    config: TrainerConfig,
    *,
    phase: Literal["sft", "warm_start"],
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    folder: RunFolder,
    resume_from: Path | None,
    log: RunLog,
) -> SupervisedStage:
    """Return the stage of task sft or of the warm start.

    Args:
        config: The configuration, with models fitted to the tokenizer.
        phase: Name of the stage.
        rows: Rows to train on; unused for streamed data.
        tokenizer: Tokenizer of the actor.
        folder: Folder for checkpoints and model.
        resume_from: Checkpoint to resume from.
        log: Log of the run.
    """
    data, seed, warm_start = config.data, config.run.seed, config.warm_start
    sources = list(data.train_sources.values())
    if warm_start is not None and warm_start.data is not None:
        sources = [warm_start.data]
    limit = get_demonstration_limit(
        config.actor.engine.model, max_tokens=config.batching.max_tokens
    )
    if data.streaming:
        open_stream = _stream_demonstrations(data, tokenizer, limit=limit, seed=seed)
        num_examples = None
    else:
        demonstrations, num_dropped = encode_demonstrations(rows, tokenizer, data)
        report_dropped(log, data, phase=phase, data=num_dropped)
        check_fits(demonstrations, max_tokens=limit)
        open_stream = _stream_list(
            demonstrations,
            data=data,
            seed=seed,
            is_sorted=all(source.difficulty_key is not None for source in sources),
        )
        num_examples = len(demonstrations)
    engine, batch_size = config.actor.engine, config.batching.prompts_per_step
    if warm_start is not None:
        engine = replace(engine, optimizer=warm_start.optimizer, schedule=warm_start.schedule)
        total_steps, batch_size = warm_start.total_steps, warm_start.batch_size
    else:
        if num_examples is not None:
            config = with_run_length(config, num_problems=num_examples)
            engine = config.actor.engine
        total_steps = config.run.total_steps
    return SupervisedStage(
        phase=phase,
        engine=with_schedule_length(engine, total_steps=total_steps, updates_per_step=1),
        open_stream=open_stream,
        objective=SftObjective(
            loss=config.sft if warm_start is None else warm_start.loss,
            has_weights=any(
                source.loss_weight_key is not None
                for source in (*sources, *data.eval_sources.values())
            ),
        ),
        total_steps=total_steps,
        batch_size=batch_size,
        tokens_per_update=config.batching.tokens_per_update,
        folder=folder,
        resume_from=resume_from,
        exports_model=warm_start is not None or config.run.save_model,
    )


def build_preference_stage(
    config: TrainerConfig,
    *,
    rows: Sequence[PreferenceRow],
    tokenizer: PreTrainedTokenizerBase,
    folder: RunFolder,
    resume_from: Path | None,
    log: RunLog,
) -> SupervisedStage:
    """Return the stage of task dpo or rm; for the arguments see `build_demonstration_stage`."""
    assert config.task in PREFERENCE_TASKS
    examples, num_dropped = encode_preferences(rows, tokenizer, config.data)
    report_dropped(log, config.data, phase=config.task, data=num_dropped)
    check_fits(
        [each for example in examples for each in example.demonstrations],
        max_tokens=get_demonstration_limit(
            config.actor.engine.model, max_tokens=config.batching.max_tokens
        ),
    )
    config = with_run_length(config, num_problems=len(examples))
    return SupervisedStage(
        phase="dpo" if config.task == "dpo" else "rm",
        engine=config.actor.engine,
        open_stream=_stream_list(examples, data=config.data, seed=config.run.seed, is_sorted=False),
        objective=build_pair_objective(config),
        reference=config.preference.reference if config.task == "dpo" else "none",
        total_steps=config.run.total_steps,
        batch_size=config.batching.prompts_per_step,
        folder=folder,
        resume_from=resume_from,
        exports_model=config.run.save_model,
    )


def _stream_list(
    examples: Sequence[TrainingExample], *, data: DataConfig, seed: int, is_sorted: bool
) -> Callable[[DataCursor], ExampleStream]:
    """Return a function that opens the stream of examples in memory; `is_sorted` by difficulty."""
    curriculum: Curriculum[TrainingExample] = Curriculum(
        get_difficulty=lambda example: get_difficulty(list_members(example)[0].prompt),
        shuffled_fraction=data.shuffled_fraction,
    )
    return lambda cursor: InMemoryStream[TrainingExample](
        examples,
        seed=seed,
        shuffle=data.shuffle,
        curriculum=curriculum if is_sorted else None,
        cursor=cursor,
    )


def _stream_demonstrations(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, limit: tuple[int, str], seed: int
) -> Callable[[DataCursor], ExampleStream]:
    """Read, tokenize and check each row only when it is needed."""

    def iterate_epoch() -> Iterator[TrainingExample]:
        weighted: list[Row] = []
        for row in iterate_rows(data.train):
            if not weighted and row.loss_weights is not None:
                weighted = [row]
            # Encode one row at a time. Unlike a list of which all rows are dropped, a dropped row
            # is no error.
            demonstrations, _ = encode_demonstrations([row], tokenizer, data, must_keep=False)
            check_fits(demonstrations, max_tokens=limit)
            yield from demonstrations
        # Known only at the end: single conversations may lack weights.
        if problem := describe_missing_weights(weighted, config=data.train):
            raise DataError(problem)

    return lambda cursor: BufferedStream[TrainingExample](
        iterate_epoch,
        seed=seed,
        buffer=data.streaming_buffer,
        shuffle=data.shuffle,
        cursor=cursor,
    )


def run_supervised(
    config: TrainerConfig,
    stage: SupervisedStage,
    *,
    log: RunLog,
    tokenizer: PreTrainedTokenizerBase,
    digest: str,
    stop: StopRequest,
    boundary: StepBoundary,
    runtime: Runtime,
) -> dict[str, float]:
    """Run all steps of a stage, evaluate it, and write its model.

    Args:
        config: The configuration, with models fitted to the tokenizer.
        stage: The stage.
        log: Log of the run.
        tokenizer: Saved with the model.
        digest: Digest of the configuration, recorded in checkpoints.
        stop: Stop request of the process.
        boundary: Bookkeeping between steps.
        runtime: Starts the workers.

    Returns:
        The metrics of the last evaluation; empty without held-out examples.

    Raises:
        RunInterrupted: If a stop was requested; the last completed step is saved.
    """
    checkpointer = open_checkpointer(config, folder=stage.folder)
    evaluator = HeldOutEvaluator(
        sets=stage.held_out,
        objective=stage.objective,
        reference=stage.reference,
        batch_size=stage.batch_size,
        max_tokens=config.batching.max_tokens,
        log=log,
    )
    start = TrainerState(
        phase=stage.phase,
        step=0,
        cursor=DataCursor(),
        weight_version=0,  # there is no sampler, so no weights are published
        config_digest=digest,
        tokenizer_digest=compute_tokenizer_digest(tokenizer),
    )
    with stop.protect_exit(
        _open_groups(stage, num_workers=config.actor.num_workers, ref=config.ref, runtime=runtime)
    ) as groups:
        actor = groups["actor"]
        stream, done = _resume(stage, actor=actor, checkpointer=checkpointer, log=log)
        boundary.set_saved(done, stage.resume_from)
        if done < stage.total_steps:
            stage.folder.supersede_model()
        if done == 0:
            evaluator.evaluate(groups, step=0)
        _run_steps(
            stage,
            config=config,
            groups=groups,
            stream=stream,
            state=replace(start, step=done),
            checkpointer=checkpointer,
            evaluator=evaluator,
            stop=stop,
            boundary=boundary,
        )
        evaluation = evaluator.evaluate(groups, step=stage.total_steps)
        if stage.exports_model:
            export_model(
                actor, engine=stage.engine, tokenizer=tokenizer, directory=stage.folder.model
            )
        return evaluation


def _run_steps(
    stage: SupervisedStage,
    *,
    config: TrainerConfig,
    groups: Mapping[str, WorkerGroup],
    stream: ExampleStream,
    state: TrainerState,
    checkpointer: Checkpointer,
    evaluator: HeldOutEvaluator,
    stop: StopRequest,
    boundary: StepBoundary,
) -> None:
    """Run the steps after that of `state`; evaluate and save between them."""
    log = boundary.log

    def check_stop() -> None:
        """Raise WorkAbandoned if a stop was requested."""
        with stop.allow_abandon():
            pass

    with (
        # Outermost, so that a signal interrupts neither an update nor the wait for a background
        # save when the body ends.
        stop.defer(),
        # Within the groups: a save in the background must end before the workers that write it are
        # closed.
        CheckpointWriter(
            checkpointer,
            roles={"actor": groups["actor"]},
            in_background=config.run.save_in_background,
        ) as writer,
        log.progress_bar(stage.phase, total=stage.total_steps, start=state.step) as bar,
    ):
        for step in range(state.step + 1, stage.total_steps + 1):
            metrics = _run_update(
                stage,
                groups=groups,
                stream=stream,
                max_tokens=config.batching.max_tokens,
                seed=derive_seed(config.run.seed, stage.phase, step),
            )
            is_last = step == stage.total_steps
            writer.commit_before_log(
                is_save_due=boundary.is_save_due(step, is_last=is_last or stop.is_set)
            )
            log.log_metrics(step, metrics, phase=stage.phase, prints_line=_is_printed(step, stage))
            boundary.end_step()
            bar.advance()
            if stage.eval_every and step % stage.eval_every == 0 and not is_last:
                # An abandoned evaluation is not repeated: the step is saved below, and the run
                # ends.
                with suppress(WorkAbandoned):
                    evaluator.evaluate(groups, step=step, check_stop=check_stop)
            if boundary.is_save_due(step, is_last=is_last or stop.is_set):
                checkpoint = writer.save(
                    replace(state, step=step, cursor=stream.cursor), wait=is_last or stop.is_set
                )
                boundary.set_saved(step, checkpoint)
            if stop.is_set:
                raise boundary.make_interrupted(stop)


@contextmanager
def _open_groups(
    stage: SupervisedStage, *, num_workers: int, ref: RoleConfig | None, runtime: Runtime
) -> Iterator[Mapping[str, WorkerGroup]]:
    """Open and initialize the workers of the actor, and the reference policy if there is one."""
    with ExitStack() as stack:
        actor = runtime.open_group("actor", engine=stage.engine, num_workers=num_workers)
        # Register `close` before `init`, so that ranks are also freed if building a model fails.
        stack.callback(actor.close)
        groups = {"actor": actor}
        if stage.reference == "ref":
            assert ref is not None
            groups["ref"] = runtime.open_group(
                "ref", engine=ref.engine, num_workers=ref.num_workers
            )
            stack.callback(groups["ref"].close)
        for group in groups.values():
            group.init()
        actor.set_objective(stage.objective)
        yield groups


def _resume(
    stage: SupervisedStage,
    *,
    actor: WorkerGroup,
    checkpointer: Checkpointer,
    log: RunLog,
) -> tuple[ExampleStream, int]:
    """Restore the actor, if there is a checkpoint.

    Returns:
        The remaining examples, and the number of completed steps.
    """
    stream = stage.open_stream(DataCursor())
    checkpoint = stage.resume_from
    if checkpoint is None:
        return stream, 0
    checkpointer.read_roles(checkpoint, roles={"actor": actor.read_part})
    done = checkpointer.read_engine_only_step(checkpoint)
    if done is None:
        state = checkpointer.read_state(checkpoint, phase=stage.phase)
        stream, done = stage.open_stream(state.cursor), state.step
    else:
        # If there is no trainer state, find the position by taking the examples of all these steps.
        for _ in range(done):
            _take_examples(stage, stream)
        log.print_line(
            f"{checkpoint} has an engine but no trainer state: the examples of {done} steps are "
            "skipped"
        )
    log.print_line(f"{stage.phase}: continuing from step {done} ({checkpoint})")
    return stream, done


def _take_examples(stage: SupervisedStage, stream: ExampleStream) -> list[TrainingExample]:
    """Return the examples of the next update."""
    limit = stage.tokens_per_update
    if limit is None:
        return stream.take(stage.batch_size)
    return stream.take_within(limit, size_of=count_tokens)


def _run_update(
    stage: SupervisedStage,
    *,
    groups: Mapping[str, WorkerGroup],
    stream: ExampleStream,
    max_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Run one update on the next examples, in micro-batches of ``max_tokens``.

    Returns:
        The metrics of the update.
    """
    start = time.perf_counter()
    examples = _take_examples(stage, stream)
    samples, plan = prepare_samples(
        examples,
        objective=stage.objective,
        reference=stage.reference,
        groups=groups,
        max_tokens=max_tokens,
        seed=seed,
    )
    (mini_batch,) = plan.mini_batches
    packed = pack_mini_batch(samples, mini_batch, "actor", objective=stage.objective)
    result = groups["actor"].update(packed, is_last_of_step=True)
    seconds = time.perf_counter() - start
    return {
        **{
            name if "/" in name else f"actor/{name}": metric.result
            for name, metric in collect_update_metrics(result).items()
        },
        "data/epoch": float(stream.cursor.epoch),
        "data/tokens": float(samples.num_tokens),
        "data/examples": float(len(examples)),
        **measure_difficulty(each.prompt for example in examples for each in list_members(example)),
        "time/step_s": seconds,
    }


def _is_printed(step: int, stage: SupervisedStage) -> bool:
    """Return True if the console shows the metrics of a step.

    Of a warm start, these are the first step and the last one of each tenth of the steps.
    """
    # A warm start has hundreds of short updates, and is only a preparation.
    if stage.phase != WARM_START_PHASE:
        return True
    total = stage.total_steps
    return step == 1 or step * 10 // total > (step - 1) * 10 // total
