"""Supervised fine-tuning: demonstrations in, a model out; a run of its own, or the warm start before RL."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_engine_api.specs import EngineConfig
from temper_trainer.algorithms.objectives import sft_objective
from temper_trainer.batching.packing import pack
from temper_trainer.batching.samples import demonstrations_to_samples
from temper_trainer.batching.step_plan import layout_of, plan_step
from temper_trainer.checkpoint.huggingface import write_model_directory
from temper_trainer.checkpoint.save import Checkpointer
from temper_trainer.checkpoint.state import TrainerState
from temper_trainer.config.algorithm import BatchingConfig
from temper_trainer.config.run import TrainerConfig
from temper_trainer.data.order import PromptStream
from temper_trainer.loops.folder import RunFolder
from temper_trainer.loops.interrupts import RunInterrupted, StopRequest
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.loops.step import update_metrics
from temper_trainer.metrics.log import RunLog
from temper_trainer.runtime.group import WorkerGroup
from temper_trainer.runtime.opening import Runtime
from temper_trainer.types import DataCursor, Demonstration
from temper_trainer.weight_sync.buckets import DEFAULT_BUCKET_BYTES, export_buckets, unpack_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStage:
    """One supervised stage: what it trains, on what, for how long."""

    phase: str
    """Name in the log: sft or warm_start."""
    engine: EngineConfig
    """Of the actor, with this stage's optimiser and schedule."""
    demonstrations: Sequence[Demonstration]
    """What is imitated."""
    total_steps: int
    """Updates."""
    batch_size: int
    """Demonstrations of one update."""
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
    runtime: Runtime,
) -> None:
    """Train, save, and write the model directory where the stage leaves one.

    Raises:
        RunInterrupted: stopped from outside; the checkpoint is saved.
    """
    checkpointer = Checkpointer(root=stage.folder.checkpoints, max_to_keep=config.run.max_ckpt_to_keep)
    stream = PromptStream(stage.demonstrations, seed=config.run.seed, shuffle=config.data.shuffle, cursor=DataCursor())
    group = runtime.open_group("actor", engine=stage.engine, num_workers=config.actor.num_workers)
    try:
        group.init()
        group.set_objective(sft_objective())
        done = 0
        found = stage.resume_from
        if found is not None:
            state = checkpointer.read_state(found, phase=stage.phase)
            checkpointer.read_roles(found, roles={"actor": group.read_part})
            stream = PromptStream(stage.demonstrations, seed=config.run.seed, shuffle=config.data.shuffle, cursor=state.cursor)
            done = state.step
            log.say(f"{stage.phase}: going on from step {done} ({found})")
        if done < stage.total_steps:
            stage.folder.set_model_aside()
        with log.bar(stage.phase, total=stage.total_steps, start=done) as bar:
            for step in range(done + 1, stage.total_steps + 1):
                log.log(step, _sft_update(config, stage, group=group, stream=stream, step=step), phase=stage.phase)
                bar.advance()
                every = config.run.save_every
                if stop.is_set or step == stage.total_steps or (every and step % every == 0):
                    state = TrainerState(phase=stage.phase, step=step, cursor=stream.cursor, weight_version=0, config_digest=digest)
                    saved = checkpointer.save(state, roles={"actor": group.write_part}, topology={"actor.dp": group.dp_size})
                    if stop.is_set:
                        raise RunInterrupted(step=step, checkpoint=str(saved))
        if stage.saves_model:
            write_model(group, engine=stage.engine, tokenizer=tokenizer, directory=stage.folder.model)
    finally:
        group.close()


def write_model(group: WorkerGroup, *, engine: EngineConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Path:
    """The group's present weights as a Hugging Face model directory; one that is already complete there is left as it is."""
    if (directory / "config.json").exists():
        return directory
    buckets = group.run(export_buckets, [(DEFAULT_BUCKET_BYTES,)] * group.num_workers)[0]
    return write_model_directory(unpack_buckets(buckets), model=engine.model, tokenizer=tokenizer, directory=directory)


def _sft_update(
    config: TrainerConfig, stage: SftStage, *, group: WorkerGroup, stream: "PromptStream[Demonstration]", step: int
) -> dict[str, float]:
    begin = time.perf_counter()
    samples = demonstrations_to_samples(stream.take(stage.batch_size))
    batching = BatchingConfig(prompts_per_step=stage.batch_size, max_tokens=config.batching.max_tokens)
    seed = derive_seed(config.run.seed, stage.phase, step)
    (mini_batch,) = plan_step(samples, batching, topologies={"actor": layout_of(group.topology)}, seed=seed).mini_batches
    result = group.update(pack(samples, mini_batch, "actor", objective=sft_objective()), is_last_of_step=True)
    seconds = time.perf_counter() - begin
    return {
        **{name if "/" in name else f"actor/{name}": metric.result for name, metric in update_metrics(result).items()},
        "data/epoch": float(stream.cursor.epoch),
        "data/tokens": float(samples.num_tokens),
        "time/step_s": seconds,
    }
