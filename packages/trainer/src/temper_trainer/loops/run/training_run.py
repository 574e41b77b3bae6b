"""Run a task from a configuration: prepare the run folder, dispatch by task, handle the end.

The order in `train` matters. It locks the folder first, so that a second process changes nothing.
Then it installs the handlers of stop requests, so that a signal during the start is handled. Then
it verifies the checkpoint, to find damage before data and models are loaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from temper_engine_api.errors import CapabilityError, CheckpointError, ConfigError, WeightError
from temper_trainer.checkpoint.checkpoint_messages import (
    describe_deletion,
    describe_last_save,
    describe_policy,
)
from temper_trainer.checkpoint.checkpointer import check_resume_step
from temper_trainer.checkpoint.step_contents import list_restored_parts
from temper_trainer.checkpoint.weight_files import find_damaged_model
from temper_trainer.config.data import name_eval_set
from temper_trainer.config.resume_changes import describe_changes
from temper_trainer.config.run import INFERENCE_TASKS
from temper_trainer.config.run_folder_checks import (
    find_generated_file_problems,
    find_inputs_in_run_folder,
)
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.memory_mapped import map_prompts
from temper_trainer.data.prompts import encode_prompts
from temper_trainer.loops.evaluation import count_trained_prompts, evaluate_all, generate
from temper_trainer.loops.held_out import encode_held_out
from temper_trainer.loops.rl_run import run_rl
from temper_trainer.loops.run.interrupts import RunInterrupted, StopRequest, WorkAbandoned
from temper_trainer.loops.run.run_components import EvalSet, build_inference_components
from temper_trainer.loops.run.run_folder import RunFolder, open_run_folder, set_aside_damaged_model
from temper_trainer.loops.run.run_setup import (
    RunData,
    fit_models_to_tokenizer,
    get_demonstration_limit,
    load_run_data,
    open_checkpointer,
    report_dropped,
    with_run_length,
)
from temper_trainer.loops.run.step_boundary import StepBoundary
from temper_trainer.loops.supervised import run_supervised
from temper_trainer.loops.supervised_stage import (
    SupervisedStage,
    build_demonstration_stage,
    build_preference_stage,
)
from temper_trainer.metrics.evaluation_estimators import name_categories
from temper_trainer.metrics.run_files import read_settings
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.run_lock import RunLock
from temper_trainer.runtime.engine_checks import find_engine_problems, iterate_engines
from temper_trainer.runtime.runtime_factory import Runtime, open_runtime
from temper_trainer.temporary_folders import remove_leftovers
from temper_trainer.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a finished run."""

    directory: Path
    """Folder that ``run.dir`` names."""
    evaluation: dict[str, float]
    """Metrics of the last evaluation; empty without held-out data."""


def train(
    config: TrainerConfig,
    *,
    digest: str,
    write_config: Callable[[Path], object],
    lock: RunLock | None = None,
    ends_process: bool = False,
) -> RunResult:
    """Run the task of a configuration from its start or from a checkpoint.

    Args:
        config: The configuration.
        digest: Digest of the configuration, recorded in checkpoints.
        write_config: Writes the resolved configuration and the origin of each value to a folder.
        lock: Lock of the run folder, if the caller has it; otherwise it is taken here.
        ends_process: True if the process ends after this call. After an interrupted run, SIGTERM
            is then ignored, because launchers repeat it.

    Raises:
        TemperError: One of `temper_engine_api.errors`, with a message that says what to do.
    """
    if lock is None:
        with RunLock(Path(config.run.dir)) as lock:
            return train(
                config,
                digest=digest,
                write_config=write_config,
                lock=lock,
                ends_process=ends_process,
            )
    # The log has its own bars; transformers' own would appear at each load and save.
    disable_progress_bar()
    # A killed process leaves its temporary folders behind, so each start removes the folders of
    # processes that no longer exist.
    remove_leftovers()
    with StopRequest(
        grace_s=config.run.stop_grace_s, ends_process=ends_process, run_dir=config.run.dir
    ) as stop:
        checkpoint, completed_steps = None, 0
        try:
            # Check this first, because open_run_folder renames the files that a failed start left.
            run_dir = Path(config.run.dir)
            problems = list(find_inputs_in_run_folder(config, run_dir))
            if config.task == "generate":
                problems += find_generated_file_problems(run_dir / config.generate.file)
            if problems:
                raise ConfigError("\n".join(problems))
            folder = open_run_folder(config.run)
            checkpointer = open_checkpointer(config, folder=folder)
            checkpoint = checkpointer.find(config.run.resume)
            if checkpoint is not None:
                completed_steps = checkpointer.read_completed_steps(checkpoint, phase=config.phase)
            evaluation = _run_task(
                config,
                digest=digest,
                write_config=write_config,
                lock=lock,
                stop=stop,
                folder=folder,
                checkpoint=checkpoint,
                completed_steps=completed_steps,
            )
        except WorkAbandoned:  # before the task has started
            raise stop.make_interrupted(step=completed_steps, checkpoint=checkpoint) from None
        except SystemExit:
            # A library, such as another Ray version, may have set its own SIGTERM handler, which
            # raises SystemExit.
            if not stop.is_set:
                raise
            raise stop.make_interrupted(step=completed_steps, checkpoint=checkpoint) from None
    # Training steps already mark the folder, but the tasks eval and generate have no steps.
    folder.mark_used()
    return RunResult(directory=folder.root, evaluation=evaluation)


def _run_task(
    config: TrainerConfig,
    *,
    digest: str,
    write_config: Callable[[Path], object],
    lock: RunLock,
    stop: StopRequest,
    folder: RunFolder,
    checkpoint: Path | None,
    completed_steps: int,
) -> dict[str, float]:
    """Load data and tokenizer, open runtime and log, and run the task."""
    if config.run.total_epochs is None:
        # Check before anything is loaded. With epochs, the step count is not known yet.
        check_resume_step(
            completed_steps, total_steps=config.run.total_steps, checkpoint=checkpoint
        )
    data = load_run_data(config, folder=folder, checkpoint=checkpoint)
    # Read the old settings before `write_config` replaces the file. Changed ones are listed below.
    previous_settings = folder.read_trained_settings()
    with stop.defer(), folder.keep_trained_settings():
        # A signal between the two files would leave settings without their origins, so defer it.
        write_config(folder.root)
    with (
        stop.protect_exit(open_runtime(config)) as runtime,
        stop.protect_exit(
            RunLog(
                folder.root,
                trackers=config.run.trackers,
                progress=config.run.progress,
                writes_report=config.run.report,
                resume_step=completed_steps if checkpoint else None,
                prometheus_port=config.run.prometheus_port,
                prometheus_address=config.run.prometheus_address,
            )
        ) as log,
        stop.protect_exit(_write_report_at_end(log, stop=stop)),
    ):
        stop.install()  # again, because a library may have set its own handler
        for line in _describe_start(
            config,
            folder=folder,
            checkpoint=checkpoint,
            previous_settings=previous_settings,
            has_saved_tokenizer=data.has_saved_tokenizer,
        ):
            log.print_line(line)
        log.try_report()  # a killed process may have left one that is behind metrics.jsonl
        boundary = StepBoundary(run=config.run, folder=folder, lock=lock, log=log)
        boundary.set_saved(completed_steps, checkpoint)
        run = _TaskRun(
            config=config,
            folder=folder,
            data=data,
            log=log,
            digest=digest,
            stop=stop,
            boundary=boundary,
            runtime=runtime,
            checkpoint=checkpoint,
            completed_steps=completed_steps,
        )
        try:
            with _add_last_save_to_errors(folder, boundary=boundary):
                evaluation = run.run()
        except WorkAbandoned:
            raise boundary.make_interrupted(stop) from None
        stop.settle()  # the run is complete but for its report
        return evaluation


def _describe_start(
    config: TrainerConfig,
    *,
    folder: RunFolder,
    checkpoint: Path | None,
    previous_settings: Mapping[str, object],
    has_saved_tokenizer: bool,
) -> Iterator[str]:
    """Yield lines on changed settings, on when the run saves, and on where it starts.

    Args:
        config: The configuration, which the run folder already has.
        folder: The run folder.
        checkpoint: Checkpoint from which the run resumes.
        previous_settings: Settings of the last start that completed a step, by dotted key; empty
            without one.
        has_saved_tokenizer: True if this start uses the tokenizer of existing weights.
    """
    # Without earlier settings nothing is compared, and reading the file takes 0.1 s.
    if previous_settings:
        yield from describe_changes(
            previous_settings,
            read_settings(folder.root),
            restored_parts=() if checkpoint is None else list_restored_parts(checkpoint),
            # A damaged model is written again. For this, the warm start may continue to train.
            has_warm_start_model=config.warm_start is not None
            and find_damaged_model(folder.warm_start.model) is None,
            has_saved_tokenizer=has_saved_tokenizer,
        )
    if config.task in INFERENCE_TASKS:
        return
    yield describe_policy(config.run)
    if warning := describe_deletion(open_checkpointer(config, folder=folder)):
        yield warning
    if checkpoint is None and config.run.resume == "auto":
        yield f"no checkpoint in {folder.checkpoints}: starting from step 1"


@contextmanager
def _write_report_at_end(log: RunLog, *, stop: StopRequest) -> Iterator[None]:
    """Write a complete report, however the body ends."""
    # If the process is still running at the deadline, a thread ends it without unwinding this
    # context, so the report is written before that.
    stop.on_late = log.try_report
    try:
        yield
    except BaseException:
        log.try_report()  # must not replace the error
        raise
    log.report()


@contextmanager
def _add_last_save_to_errors(folder: RunFolder, *, boundary: StepBoundary) -> Iterator[None]:
    """Add a note to an error in the body that says which step the run can be resumed from."""
    try:
        yield
    except RunInterrupted:  # names its checkpoint itself
        raise
    except Exception as error:
        # The advice is to resume, which would fail with the same configuration error.
        if not isinstance(error, ConfigError):
            # Other refusals are a model that the engine cannot build and a checkpoint that does not
            # fit.
            is_refusal = isinstance(error, CapabilityError | WeightError) or (
                isinstance(error, CheckpointError) and not boundary.has_completed_step
            )
            note = describe_last_save(
                folder.checkpoints,
                warm_start=folder.warm_start.checkpoints,
                needs_correction=is_refusal,
            )
            error.add_note(note)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskRun:
    """A run with its log and runtime open."""

    config: TrainerConfig
    folder: RunFolder
    data: RunData
    log: RunLog
    digest: str
    stop: StopRequest
    boundary: StepBoundary
    runtime: Runtime
    checkpoint: Path | None
    """Checkpoint from which the run resumes."""
    completed_steps: int
    """Step of the checkpoint; 0 without a checkpoint."""

    def run(self) -> dict[str, float]:
        """Run the task; return the metrics of its evaluation, empty without held-out data."""
        match self.config.task:
            case "sft" | "dpo" | "rm":
                return self.run_supervised_task()
            case "eval" | "generate":
                return self.run_inference_task()
            case "rl" | "distill":
                return self.run_rl_task()

    def run_supervised_task(self) -> dict[str, float]:
        """Run task sft, dpo or rm."""
        config = fit_models_to_tokenizer(self.config, self.data.tokenizer)
        if config.task == "sft":
            stage = build_demonstration_stage(
                config,
                phase="sft",
                rows=self.data.problems["train"],
                tokenizer=self.data.tokenizer,
                folder=self.folder,
                resume_from=self.checkpoint,
                log=self.log,
            )
        else:
            stage = build_preference_stage(
                config,
                rows=self.data.preferences["train"],
                tokenizer=self.data.tokenizer,
                folder=self.folder,
                resume_from=self.checkpoint,
                log=self.log,
            )
        check_resume_step(
            self.completed_steps, total_steps=stage.total_steps, checkpoint=self.checkpoint
        )
        limit = get_demonstration_limit(
            config.actor.engine.model, max_tokens=config.batching.max_tokens
        )
        stage = replace(
            stage,
            held_out=encode_held_out(config, self.data, limit=limit, log=self.log),
            eval_every=config.run.eval_every,
        )
        return self._run_stage(config, stage)

    def run_inference_task(self) -> dict[str, float]:
        """Run task eval or generate."""
        config = fit_models_to_tokenizer(self.config, self.data.tokenizer)
        eval_sets, dropped = self._encode_eval_sets()
        if not eval_sets:
            rows, tokenizer = self.data.problems["train"], self.data.tokenizer
            prompts, dropped["data"] = encode_prompts(rows, tokenizer, config.data)
            eval_sets[""] = EvalSet(key="data.train", prompts=prompts)
        report_dropped(self.log, config.data, phase=config.task, **dropped)
        with self.stop.protect_exit(
            build_inference_components(
                config,
                log=self.log,
                tokenizer=self.data.tokenizer,
                eval_sets=eval_sets,
                runtime=self.runtime,
            )
        ) as components:
            if config.task == "eval":
                return evaluate_all(components, step=0, label="evaluation")
            return generate(components, folder=self.folder)

    def _encode_eval_sets(self) -> tuple[dict[str, EvalSet], dict[str, int]]:
        """Tokenize the held-out problems; return them by name, and how many were dropped."""
        eval_sets: dict[str, EvalSet] = {}
        dropped: dict[str, int] = {}
        for key in self.config.data.eval_sources:
            rows = self.data.problems[key]
            prompts, num_dropped = encode_prompts(rows, self.data.tokenizer, self.config.data)
            # Refuses categories with equal metric names, before a warm start that may take hours.
            name_categories(prompt.category for prompt in prompts)
            name = name_eval_set(key)
            eval_sets[name] = EvalSet(key=key, prompts=prompts)
            dropped[f"eval/{name}" if name else "eval"] = num_dropped
        return eval_sets, dropped

    def run_rl_task(self) -> dict[str, float]:
        """Run task rl or distill, after the warm start if there is one."""
        # First what the data may refuse, because a warm start may take hours.
        data, tokenizer = self.config.data, self.data.tokenizer
        prompts: Sequence[Prompt]
        if data.streaming:
            prompts, num_dropped = map_prompts(data, tokenizer), 0
        else:
            prompts, num_dropped = encode_prompts(self.data.problems["train"], tokenizer, data)
        eval_sets, eval_dropped = self._encode_eval_sets()
        config = with_run_length(self.config, num_problems=len(prompts))
        trained_rows = list(self.data.problems["train"])
        trained_model = None
        if self.config.warm_start is not None:
            trained_model = None if self._can_skip_warm_start() else self._run_warm_start()
            trained_rows += self.data.problems.get("warm_start", [])
        config = fit_models_to_tokenizer(config, tokenizer, trained_model=trained_model)
        if trained_model is not None and self.config.actor.engine.model.path is not None:
            self.log.print_line(
                f"RL starts from the model of the warm start, {trained_model}, in place of "
                f"actor.engine.model.path {self.config.actor.engine.model.path}"
            )
        report_dropped(self.log, data, phase="rl", data=num_dropped, **eval_dropped)
        check_resume_step(
            self.completed_steps, total_steps=config.run.total_steps, checkpoint=self.checkpoint
        )
        return run_rl(
            config,
            log=self.log,
            tokenizer=self.data.tokenizer,
            prompts=prompts,
            eval_sets={
                name: replace(
                    each,
                    # To compare all rows of a stream with held-out ones, it would have to be read.
                    num_trained=None
                    if data.streaming
                    else count_trained_prompts(
                        each.prompts, rows=self.data.problems[each.key], trained=trained_rows
                    ),
                )
                for name, each in eval_sets.items()
            },
            folder=self.folder,
            resume_from=self.checkpoint,
            digest=self.digest,
            stop=self.stop,
            boundary=self.boundary,
            runtime=self.runtime,
        )

    def _can_skip_warm_start(self) -> bool:
        """Return True if no model in this run would keep warm start weights.

        This is the case when the run resumes from another run's checkpoint, in a separate folder.
        """
        if self.checkpoint is None or self.folder.warm_start.root.exists():
            return False
        roles = self.config.roles
        # Servers load the warm start's model as an adapter's base.
        is_adapted = any(role.engine.lora.is_enabled for role in roles.values())
        if is_adapted or not roles.keys() <= list_restored_parts(self.checkpoint):
            return False
        self.log.print_line(
            f"warm start: skipped, because the weights of all roles come from {self.checkpoint}"
        )
        return True

    def _run_warm_start(self) -> str:
        """Return the warm start's model directory; train it unless an earlier start has."""
        folder = self.folder.warm_start
        # The directory gets its name only when it is complete, so if it exists, an earlier start
        # has finished the warm start. A file that is missing now was lost later.
        if folder.model.exists() and not self._set_aside_if_damaged(folder.model):
            return str(folder.model)
        config = fit_models_to_tokenizer(self.config, self.data.tokenizer)
        # The engines of RL are built only after the warm start.
        if problems := list(
            find_engine_problems(dict(iterate_engines(config)), model_engine=config.model_engine)
        ):
            raise ConfigError("\n".join(problems))
        # The warm start resumes from its own checkpoints, whatever checkpoint the run resumes from.
        resume = "never" if config.run.resume == "never" else "auto"
        stage = build_demonstration_stage(
            config,
            phase="warm_start",
            rows=self.data.problems.get("warm_start", self.data.problems["train"]),
            tokenizer=self.data.tokenizer,
            folder=folder,
            resume_from=open_checkpointer(config, folder=folder).find(resume),
            log=self.log,
        )
        self._run_stage(config, stage)
        return str(folder.model)

    def _set_aside_if_damaged(self, model: Path) -> bool:
        """Rename the warm start's model if a file in it is damaged; return whether it was."""
        description = set_aside_damaged_model(model)
        if description is None:
            return False
        self.log.print_line(
            f"the model of the warm start {description}, and written again from the last "
            "checkpoint of the warm start"
        )
        return True

    def _run_stage(self, config: TrainerConfig, stage: SupervisedStage) -> dict[str, float]:
        return run_supervised(
            config,
            stage,
            log=self.log,
            tokenizer=self.data.tokenizer,
            digest=self.digest,
            stop=self.stop,
            boundary=self.boundary,
            runtime=self.runtime,
        )
