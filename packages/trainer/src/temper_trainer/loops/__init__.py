"""Whole runs, by task: RL and distillation with an optional warm start, supervised stages, evaluation, generation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import CheckpointError, ConfigError
from temper_trainer.algorithms.objective_factory import build_preference_objective
from temper_trainer.checkpoint.checkpoint_messages import (
    describe_deletion,
    describe_last_save,
    describe_policy,
)
from temper_trainer.checkpoint.checkpointer import Checkpointer
from temper_trainer.config.resume_changes import describe_changes
from temper_trainer.config.run_files import input_problems
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.prompts import (
    check_fits,
    encode_demonstrations,
    encode_pairs,
    encode_prompts,
)
from temper_trainer.data.rows import PairRow, Row
from temper_trainer.data.sources import iterate_rows, load_pairs
from temper_trainer.data.streams import BufferedStream, InMemoryStream
from temper_trainer.loops.boundary import StepBoundary
from temper_trainer.loops.evaluation import evaluate_all, trained_among
from temper_trainer.loops.folder import RunFolder, open_folder
from temper_trainer.loops.inference import generate, open_inference
from temper_trainer.loops.interrupts import RunInterrupted, RunStopped, StopRequest
from temper_trainer.loops.length import with_length, with_schedule_length
from temper_trainer.loops.opening import (
    fit_models,
    load_problems,
    longest_demonstration,
    open_checkpointer,
    open_tokenizer,
    with_training,
)
from temper_trainer.loops.rl import run_rl
from temper_trainer.loops.sft import Example, ExampleStream, SftStage, run_sft
from temper_trainer.metrics.run_files import read_settings
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.run_lock import RunLock
from temper_trainer.runtime.runtime_factory import Runtime, open_runtime
from temper_trainer.temporary_folders import remove_leftovers
from temper_trainer.types import DataCursor, Demonstration


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run leaves."""

    directory: Path
    """The run folder."""
    evaluation: dict[str, float]
    """The last evaluation's numbers by metric name; empty for SFT or without held-out problems."""


def train(
    config: TrainerConfig,
    *,
    digest: str,
    write_config: Callable[[Path], object],
    lock: RunLock | None = None,
) -> RunResult:
    """Run what the configuration says, from its start or from a checkpoint.

    Args:
        config: The composed configuration.
        digest: Its hash, which goes into checkpoints.
        write_config: Writes the resolved configuration, with the origin of every value, into a folder.
        lock: The lock of the run folder, if the caller already holds it.

    Raises:
        TemperError: One of `temper_engine_api.errors`, with what to do.
    """
    if lock is None:
        with RunLock(Path(config.run.dir)) as lock:
            return train(config, digest=digest, write_config=write_config, lock=lock)
    remove_leftovers()
    with StopRequest(grace_s=config.run.stop_grace_s) as stop:
        found, done = None, 0
        try:
            if problems := list(input_problems(config, Path(config.run.dir))):
                raise ConfigError("\n".join(problems))
            folder = open_folder(config.run)
            checkpointer = open_checkpointer(config, folder=folder)
            found = checkpointer.find(config.run.resume)
            done = 0 if found is None else _steps_done(checkpointer, found, config)
            evaluation = _train(
                config, digest, write_config, lock, stop=stop, folder=folder, found=found, done=done
            )
        except RunStopped:  # before the run was opened, or while it was closed
            raise RunInterrupted(step=done, checkpoint=found, stop=stop) from None
        except SystemExit:
            # While Ray starts, its own handler of SIGTERM is set, which exits with status 15.
            if not stop.is_set:
                raise
            raise RunInterrupted(step=done, checkpoint=found, stop=stop) from None
    folder.mark_trained()
    return RunResult(directory=folder.root, evaluation=evaluation)


def _train(
    config: TrainerConfig,
    digest: str,
    write_config: Callable[[Path], object],
    lock: RunLock,
    *,
    stop: StopRequest,
    folder: RunFolder,
    found: Path | None,
    done: int,
) -> dict[str, float]:
    if config.run.total_epochs is None:
        _check_done(done, config=config, found=found)
    problems = load_problems(config)
    pairs = load_pairs(config.data.train) if config.task in ("dpo", "rm") else []
    of_pairs = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    tokenizer = open_tokenizer(
        config, folder=folder, rows=[*problems["train"], *of_pairs, *problems.get("warm_start", [])]
    )
    before = read_settings(folder.root)
    with stop.deferred():
        write_config(folder.root)
    with (
        open_runtime(config) as runtime,
        RunLog(
            folder.root,
            trackers=config.run.trackers,
            progress=config.run.progress,
            resume_step=done if found else None,
            prometheus_port=config.run.prometheus_port,
            prometheus_address=config.run.prometheus_address,
        ) as log,
        _reported(log, stop=stop),
    ):
        stop.install()  # Ray sets a handler of its own
        for line in describe_changes(
            before, read_settings(folder.root), has_checkpoint=found is not None
        ):
            log.print_line(line)
        log.try_report()  # a killed process leaves one that is behind metrics.jsonl
        boundary = StepBoundary(run=config.run, folder=folder, lock=lock, log=log)
        boundary.set_saved(done, found)
        run = _Run(
            config=config,
            folder=folder,
            problems=problems,
            pairs=pairs,
            tokenizer=tokenizer,
            log=log,
            digest=digest,
            stop=stop,
            boundary=boundary,
            runtime=runtime,
            done=done,
        )
        if config.task not in ("eval", "generate"):
            log.print_line(describe_policy(config.run))
            if warning := describe_deletion(open_checkpointer(config, folder=folder)):
                log.print_line(warning)
            if found is None and config.run.resume == "auto":
                log.print_line(f"no checkpoint in {folder.checkpoints}: starting from step 1")
        try:
            with _last_save_named(folder):
                return run.start(found)
        except RunStopped:
            raise boundary.interrupted(stop) from None


@contextmanager
def _reported(log: RunLog, *, stop: StopRequest) -> Iterator[None]:
    """Leave a report that is complete up to the last step, however the body ends."""
    stop.on_late = log.try_report
    try:
        yield
    except BaseException:
        log.try_report()
        raise
    log.report()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What both loops begin with."""

    config: TrainerConfig
    folder: RunFolder
    problems: dict[str, list[Row]]
    pairs: list[PairRow]
    tokenizer: PreTrainedTokenizerBase
    log: RunLog
    digest: str
    stop: StopRequest
    boundary: StepBoundary
    runtime: Runtime
    done: int
    """Steps of the checkpoint that the run goes on from; 0 begins."""

    def start(self, found: Path | None) -> dict[str, float]:
        match self.config.task:
            case "sft" | "dpo" | "rm":
                return self._supervised(found)
            case "eval" | "generate":
                return self._inference()
            case "rl" | "distill":
                return self._rl(found)

    def _supervised(self, found: Path | None) -> dict[str, float]:
        config = fit_models(self.config, self.tokenizer)
        if config.task == "sft":
            stage = self._stage(
                config,
                phase="sft",
                rows=self.problems["train"],
                folder=self.folder,
                resume_from=found,
            )
        else:
            stage = self._pair_stage(config, resume_from=found)
        stage = replace(stage, saves_model=config.run.save_model)
        run_sft(
            config,
            stage,
            log=self.log,
            tokenizer=self.tokenizer,
            digest=self.digest,
            stop=self.stop,
            boundary=self.boundary,
            runtime=self.runtime,
        )
        return {}

    def _inference(self) -> dict[str, float]:
        config = fit_models(self.config, self.tokenizer)
        rows = self.problems.get("eval", self.problems["train"])
        prompts, num_dropped = encode_prompts(rows, self.tokenizer, config.data)
        self._count_dropped(config.task, data=num_dropped)
        with open_inference(
            config, log=self.log, tokenizer=self.tokenizer, prompts=prompts, runtime=self.runtime
        ) as rooms:
            if config.task == "eval":
                return evaluate_all(rooms, step=0, moment="evaluation")
            return generate(rooms, folder=self.folder)

    def _rl(self, found: Path | None) -> dict[str, float]:
        model = None if self.config.warm_start is None else self._warm_start()
        config = fit_models(self.config, self.tokenizer, trained_model=model)
        prompts, num_dropped = encode_prompts(self.problems["train"], self.tokenizer, config.data)
        eval_prompts, num_eval_dropped = encode_prompts(
            self.problems.get("eval", []), self.tokenizer, config.data
        )
        self._count_dropped("rl", data=num_dropped, eval=num_eval_dropped)
        trained = [
            *self.problems["train"],
            *([] if model is None else self.problems.get("warm_start", [])),
        ]
        config = with_length(config, num_problems=len(prompts))
        _check_done(self.done, config=config, found=found)
        return run_rl(
            config,
            log=self.log,
            tokenizer=self.tokenizer,
            prompts=prompts,
            eval_prompts=eval_prompts,
            num_eval_trained=trained_among(
                eval_prompts, rows=self.problems.get("eval", []), trained=trained
            ),
            folder=self.folder,
            resume_from=found,
            digest=self.digest,
            stop=self.stop,
            boundary=self.boundary,
            runtime=self.runtime,
        )

    def _warm_start(self) -> str:
        """The warm start's model directory, from an earlier start of this run where it is complete."""
        folder = self.folder.warm_start
        if not (folder.model / "config.json").exists():
            config = fit_models(self.config, self.tokenizer)
            rows = self.problems.get("warm_start", self.problems["train"])
            found = open_checkpointer(config, folder=folder).find(
                "never" if config.run.resume == "never" else "auto"
            )
            stage = self._stage(
                config, phase="warm_start", rows=rows, folder=folder, resume_from=found
            )
            run_sft(
                config,
                stage,
                log=self.log,
                tokenizer=self.tokenizer,
                digest=self.digest,
                stop=self.stop,
                boundary=self.boundary,
                runtime=self.runtime,
            )
        return str(folder.model)

    def _stage(
        self,
        config: TrainerConfig,
        *,
        phase: str,
        rows: list[Row],
        folder: RunFolder,
        resume_from: Path | None,
    ) -> SftStage:
        warm_start = config.warm_start
        if config.data.streaming:
            open_stream = self._open_streamed(config)
        else:
            demonstrations = self._demonstrations(config, phase=phase, rows=rows)
            open_stream = self._open_all(demonstrations)
            if warm_start is None:
                config = with_length(config, num_problems=len(demonstrations))
        if warm_start is None:
            _check_done(self.done, config=config, found=resume_from)
        total_steps = config.run.total_steps if warm_start is None else warm_start.total_steps
        engine = (
            config.actor.engine
            if warm_start is None
            else with_training(config.actor.engine, config)
        )
        return SftStage(
            phase=phase,
            engine=with_schedule_length(engine, total_steps=total_steps, updates_per_step=1),
            open_stream=open_stream,
            total_steps=total_steps,
            batch_size=config.batching.prompts_per_step
            if warm_start is None
            else warm_start.batch_size,
            tokens_per_update=config.batching.tokens_per_update,
            folder=folder,
            resume_from=resume_from,
        )

    def _demonstrations(
        self, config: TrainerConfig, *, phase: str, rows: list[Row]
    ) -> list[Demonstration]:
        demonstrations, num_dropped = encode_demonstrations(rows, self.tokenizer, config.data)
        self._count_dropped(phase, data=num_dropped)
        check_fits(demonstrations, max_tokens=longest_demonstration(config))
        return demonstrations

    def _open_all(self, examples: Sequence[Example]) -> Callable[[DataCursor], ExampleStream]:
        run, shuffle = self.config.run, self.config.data.shuffle
        return lambda cursor: InMemoryStream[Example](
            examples, seed=run.seed, shuffle=shuffle, cursor=cursor
        )

    def _open_streamed(self, config: TrainerConfig) -> Callable[[DataCursor], ExampleStream]:
        """Rows are read, tokenised and checked when their turn comes; those with an overlong prompt are passed over where they may be."""
        data, tokenizer, limit = config.data, self.tokenizer, longest_demonstration(config)

        def one_pass() -> Iterator[Example]:
            for row in iterate_rows(data.train):
                demonstrations, _ = encode_demonstrations([row], tokenizer, data, must_keep=False)
                check_fits(demonstrations, max_tokens=limit)
                yield from demonstrations

        return lambda cursor: BufferedStream[Example](
            one_pass,
            seed=config.run.seed,
            buffer=data.streaming_buffer,
            shuffle=data.shuffle,
            cursor=cursor,
        )

    def _pair_stage(self, config: TrainerConfig, *, resume_from: Path | None) -> SftStage:
        pairs, num_dropped = encode_pairs(self.pairs, self.tokenizer, config.data)
        self._count_dropped(config.task, data=num_dropped)
        check_fits(
            [each for pair in pairs for each in (pair.chosen, pair.rejected)],
            max_tokens=longest_demonstration(config),
        )
        config = with_length(config, num_problems=len(pairs))
        _check_done(self.done, config=config, found=resume_from)
        return SftStage(
            phase=config.task,
            engine=config.actor.engine,
            open_stream=self._open_all(pairs),
            objective=build_preference_objective(config.preference, task=config.task),
            reference=config.preference.reference if config.task == "dpo" else "none",
            total_steps=config.run.total_steps,
            batch_size=config.batching.prompts_per_step,
            folder=self.folder,
            resume_from=resume_from,
        )

    def _count_dropped(self, phase: str, **counts: int) -> None:
        """Say and log how many prompts were dropped for their length, by set."""
        if any(counts.values()):
            limit = self.config.data.max_prompt_tokens
            self.log.print_line(
                f"{phase}: dropped prompts longer than data.max_prompt_tokens = {limit}: {counts}"
            )
            self.log.log_metrics(
                0, {f"{name}/dropped": float(count) for name, count in counts.items()}, phase=phase
            )


@contextmanager
def _last_save_named(folder: RunFolder) -> Iterator[None]:
    """Add to an error of the body which step is really saved, as a note that is printed after it."""
    try:
        yield
    except RunInterrupted:  # names its checkpoint itself
        raise
    except Exception as error:
        if not isinstance(error, ConfigError):
            error.add_note(
                describe_last_save(folder.checkpoints, warm_start=folder.warm_start.checkpoints)
            )
        raise


def _steps_done(checkpointer: Checkpointer, found: Path, config: TrainerConfig) -> int:
    alone = checkpointer.read_engine_only_step(found)
    return (
        checkpointer.read_state(found, phase="rl" if config.task == "distill" else config.task).step
        if alone is None
        else alone
    )


def _check_done(done: int, *, config: TrainerConfig, found: Path | None) -> None:
    """Refuse to go on from a checkpoint that lies beyond the run's end."""
    if done > config.run.total_steps:
        raise CheckpointError(
            f"{found} is at step {done}, beyond run.total_steps = {config.run.total_steps}: raise run.total_steps."
        )
