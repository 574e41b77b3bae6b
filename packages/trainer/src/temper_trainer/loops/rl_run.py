"""A run of reinforcement learning or distillation, from its start or a checkpoint to its end."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_engine_api.capabilities import Capability
from temper_engine_api.errors import TemperError
from temper_engine_api.objective import Objective
from temper_trainer.algorithms.adaptive_coefficients import (
    build_entropy_controller,
    build_kl_controller,
)
from temper_trainer.algorithms.objectives.objective_factory import (
    add_distillation_loss,
    aggregate_by_prompt,
    build_policy_objective,
    build_value_objective,
)
from temper_trainer.checkpoint.checkpoint_writer import CheckpointWriter
from temper_trainer.checkpoint.checkpointer import Checkpointer
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.run import RunConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.tokenizer import compute_tokenizer_digest
from temper_trainer.loops.evaluation import evaluate_all
from temper_trainer.loops.rl_loop import is_table_due, open_step_loop
from temper_trainer.loops.rl_step import Controllers, StepResult, needs_old_logprob_pass
from temper_trainer.loops.run.interrupts import StopRequest, WorkAbandoned
from temper_trainer.loops.run.run_components import EvalSet, RunComponents, build_components
from temper_trainer.loops.run.run_folder import RunFolder, export_model
from temper_trainer.loops.run.run_setup import open_checkpointer
from temper_trainer.loops.run.step_boundary import StepBoundary
from temper_trainer.metrics.learning_watch import LearningWatch
from temper_trainer.metrics.run_log import RunLog, SampleRow
from temper_trainer.progress import Watchdog
from temper_trainer.reward.scoring import RunningStats
from temper_trainer.runtime.placement import AVERAGED_ROLE
from temper_trainer.runtime.runtime_factory import Runtime
from temper_trainer.runtime.self_teacher import update_average
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.types import DataCursor, Prompt, Rollout


def run_rl(
    config: TrainerConfig,
    *,
    log: RunLog,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    eval_sets: Mapping[str, EvalSet],
    folder: RunFolder,
    resume_from: Path | None,
    digest: str,
    stop: StopRequest,
    boundary: StepBoundary,
    runtime: Runtime,
) -> dict[str, float]:
    """Evaluate, train all steps, evaluate again, and write the model.

    Args:
        config: The configuration, as `fit_models_to_tokenizer` returns it.
        log: Log of the run.
        tokenizer: Tokenizer of all roles.
        prompts: Training prompts.
        eval_sets: Held-out prompts by name; see `RunComponents`.
        folder: The run folder.
        resume_from: Verified checkpoint to resume from; None starts at step 1.
        digest: Digest of the configuration, recorded in checkpoints.
        stop: The process's stop request.
        boundary: Bookkeeping between steps.
        runtime: Starts the processes.

    Returns:
        The metrics of the last evaluation.

    Raises:
        RunInterrupted: If a stop was requested; the last completed step is saved.
    """
    checkpointer = open_checkpointer(config, folder=folder)
    state = _load_state(
        checkpointer,
        resume_from=resume_from,
        algorithm=config.algorithm,
        prompts_per_step=config.batching.prompts_per_step,
        num_prompts=len(prompts),
        digest=digest,
        tokenizer_digest=compute_tokenizer_digest(tokenizer),
        log=log,
    )
    with stop.protect_exit(
        build_components(
            config,
            log=log,
            tokenizer=tokenizer,
            prompts=prompts,
            eval_sets=eval_sets,
            state=state,
            runtime=runtime,
        )
    ) as components:
        if config.rollout.routing_replay != "none":
            components.roles["actor"].require(Capability.ROUTING_REPLAY)
        _load_roles(components.roles, checkpointer=checkpointer, resume_from=resume_from)
        if resume_from is not None:
            log.print_line(f"continuing from step {state.step} ({resume_from})")
        boundary.set_saved(state.step, resume_from)
        if state.step < config.run.total_steps or config.run.resumes_from_path:
            folder.supersede_model()
        # The sampler starts with weights from the model path, not from the checkpoint.
        components.publisher.publish(components.canary)
        if state.step == 0:
            evaluate_all(components, step=0, label="before RL")
        _run_steps(components, state=state, checkpointer=checkpointer, stop=stop, boundary=boundary)
        evaluation = evaluate_all(components, step=config.run.total_steps, label="after RL")
        if config.run.save_model:
            export_model(
                components.roles["actor"],
                engine=config.actor.engine,
                tokenizer=tokenizer,
                directory=folder.model,
            )
    return evaluation


def _load_state(
    checkpointer: Checkpointer,
    *,
    resume_from: Path | None,
    algorithm: AlgorithmConfig,
    prompts_per_step: int,
    num_prompts: int,
    digest: str,
    tokenizer_digest: str,
    log: RunLog,
) -> TrainerState:
    """Return the state from which the run continues."""
    state = TrainerState(
        phase="rl",
        step=0,
        cursor=DataCursor(),
        weight_version=1,
        config_digest=digest,
        tokenizer_digest=tokenizer_digest,
        kl_coef=algorithm.kl_reward_coef,
        entropy_coef=algorithm.entropy_coef,
    )
    if resume_from is None:
        return state
    step = checkpointer.read_engine_only_step(resume_from)
    if step is None:
        # A resumed run may have other settings; its checkpoints record the digest of those.
        saved = checkpointer.read_state(resume_from, phase="rl")
        return replace(saved, config_digest=digest, tokenizer_digest=tokenizer_digest)
    # Without trainer state, skip as many prompts as that number of steps uses.
    epoch, index = divmod(step * prompts_per_step, num_prompts)
    log.print_line(
        f"{resume_from} has engines but no trainer state: the data continues at prompt {index} of "
        f"epoch {epoch}, where {step} steps end"
    )
    return replace(state, step=step, cursor=DataCursor(epoch=epoch, index=index))


def _load_roles(
    roles: Mapping[str, WorkerGroup], *, checkpointer: Checkpointer, resume_from: Path | None
) -> None:
    """Load every role's weights from the checkpoint, or prepare them for the first step."""
    if resume_from is not None:
        readers = {name: role.read_part for name, role in roles.items()}
        checkpointer.read_roles(resume_from, roles=readers)
    elif AVERAGED_ROLE in roles:
        # The average starts at the policy, which may come from a warm start.
        update_average(roles[AVERAGED_ROLE], actor=roles["actor"], decay=0.0)


def _run_steps(
    components: RunComponents,
    *,
    state: TrainerState,
    checkpointer: Checkpointer,
    stop: StopRequest,
    boundary: StepBoundary,
) -> None:
    config, run, log = components.config, components.config.run, components.log
    roles = components.roles
    controllers = restore_controllers(config.algorithm, state)
    objectives = build_objectives(config, controllers=controllers)
    for role, objective in objectives.items():
        roles[role].set_objective(objective)
    if config.loop != "sync" and config.algorithm.rollout_correction is None:
        log.print_line(
            f"loop {config.loop} trains on completions of older weights without correcting for it: "
            "see algorithm.rollout_correction"
        )
    with (
        # Outermost, so that a signal interrupts neither an update nor the wait for a background
        # save when the body ends.
        stop.defer(),
        CheckpointWriter(checkpointer, roles=roles, in_background=run.save_in_background) as writer,
        log.progress_bar("rl", total=run.total_steps, start=state.step) as bar,
        Watchdog(config.runtime.watchdog_s, log=log.print_line),
        open_step_loop(components, first_step=state.step + 1) as loop,
    ):

        def make_state(step: int) -> TrainerState:
            """Return the trainer state after a step, with the current controllers."""
            return save_controllers(
                controllers,
                replace(
                    state,
                    step=step,
                    cursor=loop.cursor,
                    trained_ahead=loop.trained_ahead,
                    weight_version=components.publisher.version,
                ),
            )

        # With teachers, equal rewards do not mean that there is nothing to learn from.
        watch = LearningWatch(uses_rewards=not config.has_teachers)
        for step in range(state.step + 1, run.total_steps + 1):
            # Made before the step, which moves the cursor of the data even if it fails.
            previous_state = make_state(step - 1)
            with _save_on_failure(
                previous_state, roles=roles.values(), writer=writer, stop=stop, boundary=boundary
            ):
                result = loop.run_step(step=step, objectives=objectives, controllers=controllers)
            if result.controllers.entropy != controllers.entropy:
                # The entropy coefficient is part of the objective, and workers have a copy.
                actor = build_objectives(config, controllers=result.controllers)["actor"]
                objectives |= {"actor": actor}
                roles["actor"].set_objective(actor)
            controllers = result.controllers
            is_last = step == run.total_steps
            writer.commit_before_log(
                is_save_due=boundary.is_save_due(step, is_last=is_last or stop.is_set)
            )
            _log_step(step, result, run=run, log=log, watch=watch)
            # Before a save is decided: a process that has lost the lock of the folder must save
            # nothing.
            boundary.end_step()
            bar.advance()
            if run.eval_every and step % run.eval_every == 0 and not is_last:
                # An abandoned evaluation is not repeated: the step is saved below, and the run
                # ends.
                with loop.pause_sampling(), suppress(WorkAbandoned), stop.allow_abandon():
                    evaluate_all(components, step=step, label=f"step {step}")
            if boundary.is_save_due(step, is_last=is_last or stop.is_set):
                checkpoint = writer.save(make_state(step), wait=is_last or stop.is_set)
                boundary.set_saved(step, checkpoint)
            if stop.is_set and not is_last:
                raise boundary.make_interrupted(stop)


def _log_step(
    step: int, result: StepResult, *, run: RunConfig, log: RunLog, watch: LearningWatch
) -> None:
    """Write the metrics of a step, a warning if the run does not learn, and some completions."""
    log.log_metrics(step, result.metrics, phase="rl")
    if warning := watch.observe(step, result.metrics):
        log.print_line(warning)
    # Record them before the report is written, which shows them.
    if is_table_due(step, run=run):
        rows = _pick_samples(result, count=run.num_table_rows)
        log.show_samples(step, rows, kind="training")


@contextmanager
def _save_on_failure(
    previous_state: TrainerState,
    *,
    roles: Collection[WorkerGroup],
    writer: CheckpointWriter,
    stop: StopRequest,
    boundary: StepBoundary,
) -> Iterator[None]:
    """Save the previous step if the body, which runs a step, fails before it changes a weight.

    A step spends most of its time before its first update: sampling, scoring, asking teachers.

    Args:
        previous_state: State before the step.
        roles: Workers whose weights the step changes.
        writer: Writes the checkpoint.
        stop: The process's stop request.
        boundary: Has the number of the last saved step, and the log.

    Raises:
        RunInterrupted: Instead of WorkAbandoned.
    """
    saved_step, log = previous_state.step, boundary.log
    num_updates = sum(role.num_updates for role in roles)
    try:
        yield
    except WorkAbandoned:
        # Raised only where no weight has changed yet (see `allow_stop_after_half_grace`), so the
        # roles still have the state before the step. A second save of the same step would be
        # refused.
        if saved_step != boundary.saved_step:
            boundary.set_saved(saved_step, writer.save(previous_state, wait=True))
        raise boundary.make_interrupted(stop) from None
    except TemperError:
        # After only some updates, the weights belong to no step and must not be saved. A group
        # that has lost a worker cannot save its part.
        is_unchanged = sum(role.num_updates for role in roles) == num_updates
        can_save = is_unchanged and not any(role.is_broken for role in roles)
        if can_save and saved_step != boundary.saved_step:
            failed = f"step {saved_step + 1} failed"
            try:
                checkpoint = writer.save(previous_state, wait=True)
                log.print_line(f"{failed}; step {saved_step} was saved first: {checkpoint}")
            except TemperError as error:
                # Printed, not raised: the run must end with the step's error.
                log.print_line(f"{failed}, and step {saved_step} could not be saved: {error}")
        raise


def restore_controllers(config: AlgorithmConfig, state: TrainerState) -> Controllers:
    """Return a state's controllers; a new state has the initial coefficients."""
    return Controllers(
        kl=replace(build_kl_controller(config), coef=state.kl_coef),
        entropy=replace(
            build_entropy_controller(config),
            coef=state.entropy_coef,
            is_active=state.entropy_bonus_active,
        ),
        reward_stats=RunningStats(
            count=state.reward_count, mean=state.reward_mean, squares=state.reward_squares
        ),
    )


def save_controllers(controllers: Controllers, state: TrainerState) -> TrainerState:
    """Return a state with the controllers' values; inverse of `restore_controllers`."""
    return replace(
        state,
        kl_coef=controllers.kl.coef,
        entropy_coef=controllers.entropy.coef,
        entropy_bonus_active=controllers.entropy.is_active,
        reward_count=controllers.reward_stats.count,
        reward_mean=controllers.reward_stats.mean,
        reward_squares=controllers.reward_stats.squares,
    )


def build_objectives(config: TrainerConfig, *, controllers: Controllers) -> dict[str, Objective]:
    """Return an objective per trained role, with the current coefficients."""
    correction = config.algorithm.rollout_correction
    # Without them, the objective takes its own log-probs without gradient: with one update per
    # step, the old policy is the current one (docs/decisions/0008).
    has_old_logprobs = needs_old_logprob_pass(config) or (
        correction is not None and correction.replaces_old_logprobs
    )
    actor: Objective = build_policy_objective(
        config.algorithm,
        old_is_current=not has_old_logprobs,
        entropy_coef=controllers.entropy.applied_coef,
    )
    if config.has_teachers and not config.distillation.loss.is_reward:
        actor = add_distillation_loss(
            actor if config.task == "rl" else None,
            config=config.distillation,
            algorithm=config.algorithm,
        )
    objectives = {"actor": aggregate_by_prompt(actor, config=config.algorithm)}
    if config.critic is not None:
        objectives["critic"] = build_value_objective(config.algorithm)
    return objectives


def _pick_samples(result: StepResult, *, count: int) -> list[SampleRow]:
    """Return the first completion for each of the first prompts."""
    first_of_group: dict[int, Rollout] = {}
    for rollout in result.rollouts:
        first_of_group.setdefault(rollout.group_id, rollout)
    return [
        SampleRow(
            prompt=rollout.prompt.text,
            completion=rollout.text,
            answer=rollout.prompt.answer,
            reward=rollout.reward,
        )
        for rollout in list(first_of_group.values())[:count]
    ]
