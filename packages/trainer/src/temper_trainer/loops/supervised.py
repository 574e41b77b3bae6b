"""Run a supervised stage: train on demonstrations or preferences, and write a model.

A stage is either a separate run (tasks sft, dpo and rm) or the warm start for an RL run.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from temper_trainer.batching.step_plan import pack_mini_batch
from temper_trainer.checkpoint.checkpoint_writer import CheckpointWriter
from temper_trainer.checkpoint.checkpointer import Checkpointer
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.run import RoleConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.streams import measure_difficulty
from temper_trainer.data.tokenizer import compute_tokenizer_digest
from temper_trainer.loops.example_batches import (
    TrainingExample,
    count_tokens,
    list_demonstrations,
    prepare_samples,
)
from temper_trainer.loops.held_out import HeldOutEvaluator
from temper_trainer.loops.rl_step import collect_update_metrics
from temper_trainer.loops.run.interrupts import StopRequest, WorkAbandoned
from temper_trainer.loops.run.run_folder import export_model
from temper_trainer.loops.run.run_setup import open_checkpointer
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.loops.run.step_boundary import StepBoundary
from temper_trainer.loops.supervised_stage import ExampleStream, SupervisedStage
from temper_trainer.metrics.run_files import WARM_START_PHASE
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.runtime.runtime_factory import Runtime
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.types import DataCursor


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
        config: The configuration, as `fit_models_to_tokenizer` returns it.
        stage: The stage.
        log: Log of the run.
        tokenizer: Saved with the model.
        digest: Digest of the configuration, recorded in checkpoints.
        stop: The process's stop request.
        boundary: Checks the lock and decides on saves between steps.
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
        if done < stage.total_steps or config.run.resumes_from_path:
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
        # The first context, so that signals are deferred not only during updates, but also while
        # the exit of a later context waits for a background save.
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
        The remaining examples, and how many steps are completed.
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
        The update's metrics.
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
    # A supervised step is one optimizer update, so its plan has one mini-batch.
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
        **measure_difficulty(
            each.prompt for example in examples for each in list_demonstrations(example)
        ),
        "time/step_s": seconds,
    }


def _is_printed(step: int, stage: SupervisedStage) -> bool:
    """Return True if the console shows a step's metrics.

    All steps are shown, but in a warm start only the first one and ten more at equal distances.
    """
    # A warm start has hundreds of short updates, and is only a preparation.
    if stage.phase != WARM_START_PHASE:
        return True
    total = stage.total_steps
    return step == 1 or step * 10 // total > (step - 1) * 10 // total
