"""Definition of a supervised stage: examples, objective, engine and number of updates.

`temper_trainer.loops.supervised` runs it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from temper_engine_api.objective import Objective
from temper_engine_api.specs import EngineConfig
from temper_trainer.algorithms.objectives.objective_factory import build_pair_objective
from temper_trainer.algorithms.objectives.supervised_losses import SftObjective
from temper_trainer.algorithms.preference_losses.preference_loss import ReferenceSource
from temper_trainer.config.data import DataConfig
from temper_trainer.config.run import PREFERENCE_TASKS
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.loss_weights import describe_missing_weights
from temper_trainer.data.prompts import encode_demonstrations, encode_preferences
from temper_trainer.data.rows import DataError, PreferenceRow, Row
from temper_trainer.data.sources import iterate_rows
from temper_trainer.data.streams import BufferedStream, Curriculum, InMemoryStream, get_difficulty
from temper_trainer.loops.example_batches import TrainingExample, keep_fitting, list_demonstrations
from temper_trainer.loops.held_out import HeldOutSet
from temper_trainer.loops.run.run_folder import RunFolder
from temper_trainer.loops.run.run_setup import (
    get_demonstration_limit,
    report_dropped,
    with_run_length,
    with_schedule_length,
)
from temper_trainer.metrics.run_log import RunLog
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
    """The actor's engine, with the stage's optimizer and schedule."""
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
    """Return the stage for task sft or the warm start.

    Args:
        config: The configuration, as `fit_models_to_tokenizer` returns it.
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
    if data.streaming and (warm_start is None or warm_start.data is None):
        open_stream = _stream_demonstrations(
            data,
            tokenizer,
            limit=limit,
            seed=seed,
            report=lambda line: log.print_line(f"{phase}: {line}"),
        )
        num_examples = None
    else:
        encoded, _ = encode_demonstrations(rows, tokenizer, data)
        demonstrations = keep_fitting(encoded, max_tokens=limit, config=data)
        report_dropped(log, data, phase=phase, data=len(rows) - len(demonstrations))
        open_stream = _stream_list(
            demonstrations,
            data=data,
            seed=seed,
            # A curriculum needs the difficulty of every example.
            is_sorted=all(source.difficulty_key is not None for source in sources),
        )
        num_examples = len(demonstrations)
    engine, batch_size = config.actor.engine, config.batching.prompts_per_step
    if warm_start is not None:
        # A warm start has settings of its own: `run`, `batching` and `actor` have those of RL.
        engine = replace(engine, optimizer=warm_start.optimizer, schedule=warm_start.schedule)
        total_steps, batch_size = warm_start.total_steps, warm_start.batch_size
    else:
        # Epochs of a stream cannot be converted to steps, because its length is not known.
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
    encoded, _ = encode_preferences(rows, tokenizer, config.data)
    examples = keep_fitting(
        encoded,
        max_tokens=get_demonstration_limit(
            config.actor.engine.model, max_tokens=config.batching.max_tokens
        ),
        config=config.data,
    )
    report_dropped(log, config.data, phase=config.task, data=len(rows) - len(examples))
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
    """Return a function that opens a stream of examples in memory.

    Args:
        examples: All examples of an epoch.
        data: Settings of the order.
        seed: Seed of the order.
        is_sorted: True to sort the examples by difficulty.
    """
    curriculum: Curriculum[TrainingExample] = Curriculum(
        get_difficulty=lambda example: get_difficulty(list_demonstrations(example)[0].prompt),
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
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: tuple[int, str],
    seed: int,
    report: Callable[[str], None],
) -> Callable[[DataCursor], ExampleStream]:
    """Return a function that opens a stream, which reads and tokenizes rows when they are needed.

    Args:
        data: Settings of the source and the order.
        tokenizer: Tokenizer of the actor.
        limit: Maximum number of tokens per example, and the key that sets it.
        seed: Seed of the order.
        report: Prints a line about dropped rows.
    """
    source = data.train_sources["data.train"]

    def iterate_epoch() -> Iterator[TrainingExample]:
        first_weighted: list[Row] = []
        num_rows = num_kept = 0
        for row in iterate_rows(source):
            if not first_weighted and row.loss_weights is not None:
                first_weighted = [row]
            # Encode one row at a time; `must_keep=False`, because a single row may be dropped.
            encoded, _ = encode_demonstrations(
                [row], tokenizer, data, must_keep=False, must_use_tools=False
            )
            kept = keep_fitting(encoded, max_tokens=limit, config=data, must_keep=False)
            num_rows, num_kept = num_rows + 1, num_kept + len(kept)
            yield from kept
        if num_kept < num_rows:
            report(f"dropped {num_rows - num_kept} of {num_rows} streamed rows as too long")
        # Check at the end of the epoch: a conversation may lack weights, but not all of them.
        if problem := describe_missing_weights(first_weighted, config=source):
            raise DataError(problem)

    return lambda cursor: BufferedStream[TrainingExample](
        iterate_epoch,
        seed=seed,
        buffer=data.streaming_buffer,
        shuffle=data.shuffle,
        cursor=cursor,
    )
