"""Supervised stages: demonstrations or pairs in, a model out; a run of its own (tasks sft, dpo, rm), or the warm start before RL."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.specs import EngineConfig
from temper_trainer.algorithms.objective_factory import build_sft_objective
from temper_trainer.batching.samples import demonstrations_to_samples, pairs_to_samples
from temper_trainer.batching.step_plan import RoleLayout, pack_mini_batch, plan_step
from temper_trainer.checkpoint.checkpoint_writer import CheckpointWriter
from temper_trainer.checkpoint.huggingface_export import write_model_directory
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.algorithm import BatchingConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.loops.boundary import StepBoundary
from temper_trainer.loops.folder import RunFolder
from temper_trainer.loops.interrupts import StopRequest
from temper_trainer.loops.opening import open_checkpointer
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.loops.step import forward_pass, update_metrics
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.runtime.runtime_factory import Runtime
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.types import DataCursor, Demonstration, Pair
from temper_trainer.weight_sync.buckets import DEFAULT_BUCKET_BYTES, export_buckets, unpack_buckets

Example = Demonstration | Pair
"""What a supervised stage learns from."""


class ExampleStream(Protocol):
    """Examples handed out for ever; see ``InMemoryStream`` and ``BufferedStream``."""

    @property
    def cursor(self) -> DataCursor:
        """Where the next take begins."""
        ...

    def take(self, count: int) -> list[Example]:
        """The next ``count``."""
        ...

    def take_within(self, limit: int, *, size_of: Callable[[Example], int]) -> list[Example]:
        """The next in order until one more would exceed a limit; at least one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStage:
    """One supervised stage: what it trains, on what, for how long."""

    phase: str
    """Name in the log: sft, dpo, rm or warm_start."""
    engine: EngineConfig
    """Of the actor, with this stage's optimiser and schedule."""
    open_stream: Callable[[DataCursor], ExampleStream]
    """What is learned from, from a cursor on."""
    objective: Objective = field(default_factory=build_sft_objective)
    """What is minimised."""
    reference: Literal["ref", "disabled_adapter", "none"] = "none"
    """Whose log-probs the objective reads beside the policy's."""
    tokens_per_update: int | None = None
    """An update takes examples until the next would exceed this; None takes batch_size of them."""
    total_steps: int
    """Updates."""
    batch_size: int
    """Examples of one update, where tokens_per_update does not say otherwise."""
    folder: RunFolder
    """Where its checkpoints and model go."""
    resume_from: Path | None
    """Step directory that it goes on from."""
    saves_model: bool = True
    """Whether it leaves a Hugging Face model directory."""


def run_sft(
    config: TrainerConfig,
    stage: SftStage,
    *,
    log: RunLog,
    tokenizer: PreTrainedTokenizerBase,
    digest: str,
    stop: StopRequest,
    boundary: StepBoundary,
    runtime: Runtime,
) -> None:
    """Train, save, and write the model directory where the stage leaves one.

    Raises:
        RunInterrupted: If the run was asked to stop; the last complete step is saved.
    """
    checkpointer = open_checkpointer(config, folder=stage.folder)
    stream = stage.open_stream(DataCursor())
    with ExitStack() as stack:
        groups = {
            "actor": runtime.open_group(
                "actor", engine=stage.engine, num_workers=config.actor.num_workers
            )
        }
        stack.callback(groups["actor"].close)
        if stage.reference == "ref":
            assert config.ref is not None
            groups["ref"] = runtime.open_group(
                "ref", engine=config.ref.engine, num_workers=config.ref.num_workers
            )
            stack.callback(groups["ref"].close)
        for group in groups.values():
            group.init()
        group = groups["actor"]
        group.set_objective(stage.objective)
        done = 0
        found = stage.resume_from
        if found is not None:
            alone = checkpointer.read_engine_only_step(found)
            checkpointer.read_roles(found, roles={"actor": group.read_part})
            if alone is None:
                state = checkpointer.read_state(found, phase=stage.phase)
                stream, done = stage.open_stream(state.cursor), state.step
            else:
                done = _pass_over(stage, stream, num_steps=alone)
                log.print_line(
                    f"{found} holds an engine without a trainer: the examples of {done} steps are passed over"
                )
            log.print_line(f"{stage.phase}: going on from step {done} ({found})")
        boundary.set_saved(done, found)
        if done < stage.total_steps:
            stage.folder.set_model_aside()
        saves = stack.enter_context(
            CheckpointWriter(
                checkpointer, roles={"actor": group}, in_background=config.run.save_in_background
            )
        )
        with (
            stop.deferred(),
            log.progress_bar(stage.phase, total=stage.total_steps, start=done) as bar,
        ):
            for step in range(done + 1, stage.total_steps + 1):
                log.log_metrics(
                    step,
                    _sft_update(config, stage, groups=groups, stream=stream, step=step),
                    phase=stage.phase,
                )
                boundary.end_step()
                bar.advance()
                saves.commit_if_written()
                is_last = step == stage.total_steps or stop.is_set
                if boundary.is_save_due(step, is_last=is_last):
                    state = TrainerState(
                        phase=stage.phase,
                        step=step,
                        cursor=stream.cursor,
                        weight_version=0,
                        config_digest=digest,
                    )
                    boundary.set_saved(step, saves.save(state, wait=is_last))
                if stop.is_set:
                    raise boundary.interrupted(stop)
        if stage.saves_model:
            write_model(
                group, engine=stage.engine, tokenizer=tokenizer, directory=stage.folder.model
            )


def write_model(
    group: WorkerGroup, *, engine: EngineConfig, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> Path:
    """The group's present weights as a Hugging Face model directory; one that is already complete there is left as it is."""
    if (directory / "config.json").exists():
        return directory
    buckets = group.run(export_buckets, [(DEFAULT_BUCKET_BYTES,)] * group.num_workers)[0]
    return write_model_directory(
        unpack_buckets(buckets), model=engine.model, tokenizer=tokenizer, directory=directory
    )


def samples_of(examples: Sequence[Example]) -> SequenceBatch:
    """Demonstrations, or pairs, as samples."""
    pairs = [example for example in examples if isinstance(example, Pair)]
    if pairs:
        return pairs_to_samples(pairs)
    return demonstrations_to_samples(
        [example for example in examples if isinstance(example, Demonstration)]
    )


def num_tokens(example: Example) -> int:
    """Of a demonstration with its prompt, or of both of a pair."""
    members = (example.chosen, example.rejected) if isinstance(example, Pair) else (example,)
    return sum(len(member.prompt.tokens) + len(member.tokens) for member in members)


def _pass_over(stage: SftStage, stream: ExampleStream, *, num_steps: int) -> int:
    for _ in range(num_steps):
        _next_examples(stage, stream)
    return num_steps


def _next_examples(stage: SftStage, stream: ExampleStream) -> Sequence[Example]:
    """Of one update."""
    limit = stage.tokens_per_update
    return (
        stream.take(stage.batch_size)
        if limit is None
        else stream.take_within(limit, size_of=num_tokens)
    )


def _sft_update(
    config: TrainerConfig,
    stage: SftStage,
    *,
    groups: Mapping[str, WorkerGroup],
    stream: ExampleStream,
    step: int,
) -> dict[str, float]:
    begin = time.perf_counter()
    examples = _next_examples(stage, stream)
    samples = samples_of(examples)
    batching = BatchingConfig(prompts_per_step=len(examples), max_tokens=config.batching.max_tokens)
    seed = derive_seed(config.run.seed, stage.phase, step)
    layouts = {name: RoleLayout.from_topology(group.topology) for name, group in groups.items()}
    plan = plan_step(samples, batching, layouts=layouts, seed=seed)
    if stage.reference != "none":
        role = "ref" if stage.reference == "ref" else "actor"
        found = forward_pass(
            groups[role],
            samples,
            plan,
            role=role,
            head_output=HeadOutput.LOGPROB,
            without_adapter=role == "actor",
        )
        samples = samples.with_columns({"ref_logprobs": found})
    (mini_batch,) = plan.mini_batches
    result = groups["actor"].update(
        pack_mini_batch(samples, mini_batch, "actor", objective=stage.objective),
        is_last_of_step=True,
    )
    seconds = time.perf_counter() - begin
    return {
        **{
            name if "/" in name else f"actor/{name}": metric.result
            for name, metric in update_metrics(result).items()
        },
        "data/epoch": float(stream.cursor.epoch),
        "data/tokens": float(samples.num_tokens),
        "data/examples": float(len(examples)),
        "time/step_s": seconds,
    }
