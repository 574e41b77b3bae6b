"""A whole RL run: open the rooms, restore, evaluate, step, save, evaluate again, leave a model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from temper_engine_api.batch import from_sequences
from temper_engine_api.errors import TemperError
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from temper_trainer.algorithms.objective_factory import (
    add_distillation_loss,
    build_policy_objective,
    build_value_objective,
)
from temper_trainer.checkpoint.checkpoint_writer import CheckpointWriter
from temper_trainer.checkpoint.checkpointer import Checkpointer
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.streams import InMemoryStream
from temper_trainer.environment.environment_factory import make_environment_factory
from temper_trainer.loops.boundary import StepBoundary
from temper_trainer.loops.controllers import Controllers, restored_controllers
from temper_trainer.loops.evaluation import evaluate_all
from temper_trainer.loops.folder import RunFolder
from temper_trainer.loops.interrupts import RunStopped, StopRequest
from temper_trainer.loops.opening import open_checkpointer
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.sft import write_model
from temper_trainer.loops.step import StepResult, measures_old_logprobs
from temper_trainer.loops.steps import Steps, open_steps
from temper_trainer.metrics.run_log import RunLog, SampleRow
from temper_trainer.reward.scoring import Scorer
from temper_trainer.rollout.pausable_sampler import PausableSampler
from temper_trainer.rollout.sampler import InterruptibleSampler, Sampler
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.runtime.engine_reward_model import build_reward_model
from temper_trainer.runtime.engine_teacher import build_teachers
from temper_trainer.runtime.runtime_factory import Runtime
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.types import DataCursor, Prompt
from temper_trainer.waits import Watchdog
from temper_trainer.weight_sync.publisher import Canary, Publisher
from temper_trainer.weight_sync.transport_factory import build_transport


def run_rl(
    config: TrainerConfig,
    *,
    log: RunLog,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    folder: RunFolder,
    resume_from: Path | None,
    digest: str,
    stop: StopRequest,
    boundary: StepBoundary,
    runtime: Runtime,
    num_eval_trained: int | None = None,
) -> dict[str, float]:
    """All steps of a run, from a checkpoint where one is given.

    Returns:
        The last evaluation's numbers by metric name.

    Raises:
        RunInterrupted: If the run was asked to stop; the last complete step is saved.
    """
    checkpointer = open_checkpointer(config, folder=folder)
    state = TrainerState(
        phase="rl",
        step=0,
        cursor=DataCursor(),
        weight_version=1,
        config_digest=digest,
        kl_coef=config.algorithm.kl_reward_coef,
        entropy_coef=config.algorithm.entropy_coef,
    )
    alone = None if resume_from is None else checkpointer.read_engine_only_step(resume_from)
    if alone is not None:
        epoch, index = divmod(alone * config.batching.prompts_per_step, len(prompts))
        state = replace(state, step=alone, cursor=DataCursor(epoch=epoch, index=index))
        log.print_line(
            f"{resume_from} holds engines without a trainer: the data go on at prompt {index} of epoch {epoch}, where {alone} steps end"
        )
    elif resume_from is not None:
        state = checkpointer.read_state(resume_from, phase="rl")
        state = replace(state, config_digest=digest)
    with open_rooms(
        config,
        log=log,
        tokenizer=tokenizer,
        prompts=prompts,
        eval_prompts=eval_prompts,
        num_eval_trained=num_eval_trained,
        state=state,
        runtime=runtime,
    ) as rooms:
        if resume_from is not None:
            checkpointer.read_roles(
                resume_from, roles={name: role.read_part for name, role in rooms.roles.items()}
            )
            log.print_line(f"going on from step {state.step} ({resume_from})")
        boundary.set_saved(state.step, resume_from)
        if state.step < config.run.total_steps:
            folder.set_model_aside()
        rooms.publisher.publish(rooms.canary)
        if state.step == 0:
            evaluate_all(rooms, step=0, moment="before RL")
        _run_steps(rooms, state=state, checkpointer=checkpointer, stop=stop, boundary=boundary)
        found = evaluate_all(rooms, step=config.run.total_steps, moment="after RL")
        if config.run.save_model:
            write_model(
                rooms.roles["actor"],
                engine=config.actor.engine,
                tokenizer=tokenizer,
                directory=folder.model,
            )
    return found


@contextmanager
def open_rooms(
    config: TrainerConfig,
    *,
    log: RunLog,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    state: TrainerState,
    runtime: Runtime,
    num_eval_trained: int | None = None,
) -> Iterator[Rooms]:
    """Build every room of a run and close them all, also when the body raises."""
    engines = {"actor": config.actor, "critic": config.critic, "ref": config.ref}
    with ExitStack() as stack:
        roles: dict[str, WorkerGroup] = {}
        for name, role in engines.items():
            if role is not None:
                roles[name] = runtime.open_group(
                    name,
                    engine=role.engine,
                    num_workers=role.num_workers,
                    is_deprecated=config.use_legacy_worker_impl == "enable",
                )
                stack.callback(roles[name].close)
        for group in roles.values():
            group.init()
        sampler = runtime.open_sampler(config, tokenizer=tokenizer)
        stack.callback(sampler.close)
        teachers = build_teachers(config, runtime=runtime, tokenizer=tokenizer)
        if teachers is not None:
            stack.callback(teachers.close)
        reward_model = build_reward_model(config, runtime=runtime, tokenizer=tokenizer)
        if reward_model is not None:
            stack.callback(reward_model.close)
        transport = build_transport(config, actor=roles["actor"], sampler=sampler)
        stack.callback(transport.close)
        publisher = Publisher(
            transport=transport,
            sampler=sampler,
            version=state.weight_version - 1,
            software=sampler.software if isinstance(sampler, VllmSampler) else "",
        )
        yield Rooms(
            config=config,
            log=log,
            tokenizer=tokenizer,
            prompts=InMemoryStream(
                prompts, seed=config.run.seed, shuffle=config.data.shuffle, cursor=state.cursor
            ),
            eval_prompts=eval_prompts,
            sampler=_sampler_of_loop(config, sampler),
            scorer=stack.enter_context(Scorer(config.reward, model=reward_model)),
            roles=roles,
            publisher=publisher,
            teachers=teachers,
            make_environment=None
            if config.environment is None
            else make_environment_factory(config.environment, tokenizer=tokenizer),
            canary=_canary(config, roles["actor"], prompt=prompts[0])
            if config.rollout.canary
            else None,
            num_eval_trained=num_eval_trained,
        )


@contextmanager
def _open_watched(rooms: Rooms, state: TrainerState, controllers: Controllers) -> Iterator[Steps]:
    """The loop's steps, with a watchdog over every wait in them."""
    config = rooms.config
    if config.loop != "sync" and config.algorithm.rollout_correction is None:
        rooms.log.print_line(
            f"loop {config.loop} trains on completions of older weights as if they were new: see algorithm.rollout_correction"
        )
    with (
        Watchdog(config.runtime.watchdog_s, log=rooms.log.print_line),
        open_steps(rooms, state=state, controllers=controllers) as steps,
    ):
        yield steps


def _sampler_of_loop(config: TrainerConfig, sampler: Sampler) -> Sampler:
    """The sampler as the loop uses it: loop async stops and continues it from two threads."""
    if config.loop != "async":
        return sampler
    assert isinstance(sampler, InterruptibleSampler)
    return PausableSampler(sampler, interrupts=config.asynchrony.partial_rollouts)


def _run_steps(
    rooms: Rooms,
    *,
    state: TrainerState,
    checkpointer: Checkpointer,
    stop: StopRequest,
    boundary: StepBoundary,
) -> None:
    config, run, log = rooms.config, rooms.config.run, rooms.log
    controllers = restored_controllers(config.algorithm, state)
    objectives = objectives_of(config, controllers=controllers)
    for role, objective in objectives.items():
        rooms.roles[role].set_objective(objective)
    with (
        stop.deferred(),
        CheckpointWriter(
            checkpointer, roles=rooms.roles, in_background=run.save_in_background
        ) as saves,
        log.progress_bar("rl", total=run.total_steps, start=state.step) as bar,
        _open_watched(rooms, state, controllers) as steps,
    ):
        for step in range(state.step + 1, run.total_steps + 1):
            before = _state_after(
                rooms,
                step=step - 1,
                cursor=steps.cursor,
                controllers=controllers,
                digest=state.config_digest,
            )
            with _saved_on_failure(before, rooms=rooms, saves=saves, stop=stop, boundary=boundary):
                result = steps.step(step=step, objectives=objectives, controllers=controllers)
            if result.controllers.entropy != controllers.entropy:
                objectives |= {
                    "actor": objectives_of(config, controllers=result.controllers)["actor"]
                }
                rooms.roles["actor"].set_objective(objectives["actor"])
            controllers = result.controllers
            saves.commit_if_written()
            log.log_metrics(step, result.metrics, phase="rl")
            boundary.end_step()
            bar.advance()
            if run.table_every and step % run.table_every == 0:
                log.show_samples(step, _rows(result, count=run.num_table_rows))
            is_last = step == run.total_steps
            if run.eval_every and step % run.eval_every == 0 and not is_last:
                with steps.settled(), suppress(RunStopped), stop.abandonable():
                    evaluate_all(rooms, step=step, moment=f"step {step}")
            if boundary.is_save_due(step, is_last=is_last or stop.is_set):
                made = _state_after(
                    rooms,
                    step=step,
                    cursor=steps.cursor,
                    controllers=controllers,
                    digest=state.config_digest,
                )
                boundary.set_saved(step, saves.save(made, wait=is_last or stop.is_set))
            if stop.is_set and not is_last:
                raise boundary.interrupted(stop)


@contextmanager
def _saved_on_failure(
    before: TrainerState,
    *,
    rooms: Rooms,
    saves: CheckpointWriter,
    stop: StopRequest,
    boundary: StepBoundary,
) -> Iterator[None]:
    """Save the state before a step that fails, or is abandoned, before it has changed a weight.

    That is the case while it samples, scores or asks teachers, where most of its time goes.

    Raises:
        RunInterrupted: In place of RunStopped.
    """
    num_updates = _num_updates(rooms)
    try:
        yield
    except RunStopped:
        if before.step != boundary.saved_step:
            boundary.set_saved(before.step, saves.save(before, wait=True))
        raise boundary.interrupted(stop) from None
    except TemperError:
        is_whole = _num_updates(rooms) == num_updates and not any(
            role.is_broken for role in rooms.roles.values()
        )
        if is_whole and before.step != boundary.saved_step:
            try:
                rooms.log.print_line(
                    f"step {before.step + 1} failed; step {before.step} was saved first: {saves.save(before, wait=True)}"
                )
            except TemperError as second:  # the first one is what the run ends with
                rooms.log.print_line(
                    f"step {before.step + 1} failed, and step {before.step} could not be saved: {second}"
                )
        raise


def _num_updates(rooms: Rooms) -> int:
    return sum(role.num_updates for role in rooms.roles.values())


def objectives_of(config: TrainerConfig, *, controllers: Controllers) -> dict[str, Objective]:
    """What every trained role minimises, under the controllers' present coefficients."""
    correction = config.algorithm.rollout_correction
    is_measured = measures_old_logprobs(config) or (
        correction is not None and correction.proximal == "rollout"
    )
    actor: Objective = build_policy_objective(
        config.algorithm, old_is_current=not is_measured, entropy_coef=controllers.entropy.coef
    )
    if config.teachers and config.distillation.apply_as == "loss":
        actor = add_distillation_loss(
            actor if config.task == "rl" else None,
            config=config.distillation,
            algorithm=config.algorithm,
        )
    objectives: dict[str, Objective] = {"actor": actor}
    if config.critic is not None:
        objectives["critic"] = build_value_objective(config.algorithm)
    return objectives


def _state_after(
    rooms: Rooms, *, step: int, cursor: DataCursor, controllers: Controllers, digest: str
) -> TrainerState:
    return TrainerState(
        phase="rl",
        step=step,
        cursor=cursor,
        weight_version=rooms.publisher.version,
        config_digest=digest,
        kl_coef=controllers.kl.coef,
        entropy_coef=controllers.entropy.coef,
        reward_count=controllers.rewards.count,
        reward_mean=controllers.rewards.mean,
        reward_squares=controllers.rewards.squares,
    )


def _rows(result: StepResult, *, count: int) -> list[SampleRow]:
    """The first completions of different prompts."""
    seen: set[int] = set()
    rows: list[SampleRow] = []
    for rollout in result.rollouts:
        if rollout.group_id not in seen and len(rows) < count:
            seen.add(rollout.group_id)
            rows.append(
                SampleRow(
                    prompt=rollout.prompt.text,
                    completion=rollout.text,
                    answer=rollout.prompt.answer,
                    reward=rollout.reward,
                )
            )
    return rows


def _canary(config: TrainerConfig, actor: WorkerGroup, *, prompt: Prompt) -> Canary:
    """The first training prompt, or its last 64 tokens."""
    tokens = torch.tensor(prompt.tokens[-64:] if len(prompt.tokens) > 1 else prompt.tokens * 2)
    batch = from_sequences([tokens], loss_masks=[torch.zeros(len(tokens), dtype=torch.bool)])
    plan = plan_mini_batch(
        [len(tokens)],
        dp_size=actor.dp_size,
        max_tokens=config.batching.max_tokens,
        constraints=actor.topology.plan_constraints,
    )
    denominators = count_denominators(batch)
    parts = [
        build_packed_batch(batch, plan=plan, rank=rank, denominators=denominators)
        for rank in range(actor.dp_size)
    ]

    def engine_logprobs() -> list[float]:
        outputs = actor.forward(parts, outputs=[HeadOutput.LOGPROB], sample_ids=batch.sample_ids)
        found: list[float] = outputs.columns[HeadOutput.LOGPROB][1:].tolist()
        return found

    return Canary(
        tokens=tuple(tokens.tolist()),
        engine_logprobs=engine_logprobs,
        tolerance=config.rollout.resolve_canary_tolerance(config.actor.engine.precision.compute),
    )
