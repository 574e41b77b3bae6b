"""Prepare a run: its checkpointer, its data and tokenizer, the sizes of its models, its length."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig, ModelSpec, Scalar
from temper_trainer.checkpoint.checkpointer import Checkpointer, load_run_id
from temper_trainer.config.data import DataConfig
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.run import RoleConfig, describe_short_epoch
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.rows import DataError, PreferenceRow, Row
from temper_trainer.data.sources import load_preferences, load_rows
from temper_trainer.loops.run.run_folder import RunFolder
from temper_trainer.loops.run.run_tokenizer import load_or_train_tokenizer, uses_saved_tokenizer
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.reward.registry import find_unknown_rewards
from temper_trainer.runtime.checkpoint_verification import make_checkpoint_verifier

logger = logging.getLogger(__name__)


def open_checkpointer(config: TrainerConfig, *, folder: RunFolder) -> Checkpointer:
    """Return the checkpointer for a folder: the run's own, or the one of its warm start."""
    run = config.run
    return Checkpointer(
        root=folder.checkpoints,
        max_to_keep=run.max_ckpt_to_keep,
        keep_every=run.keep_every,
        run_id=load_run_id(Path(run.dir)),
        verify=make_checkpoint_verifier(
            run.verify_checkpoints, runtime=config.runtime, num_ranks=config.actor.num_workers
        ),
    )


def load_problems(config: TrainerConfig) -> dict[str, list[Row]]:
    """Load the rows of ``data.train``, ``warm_start.data`` and all held-out sources.

    Returns:
        Rows by ``train``, ``warm_start`` and the keys of ``DataConfig.eval_sources``. Only
        ``train`` is always a key. Its list is empty if the data is streamed or consists of
        preferences. `load_run_data` reads preferences, also those of the held-out sources, which
        are then left out here.
    """
    has_preferences = config.preference_kind is not None
    is_read_elsewhere = config.data.streaming or has_preferences
    sources = {} if has_preferences else dict(config.data.eval_sources)
    if config.warm_start is not None and config.warm_start.data is not None:
        sources["warm_start"] = config.warm_start.data
    rows_by_source = {
        "train": [] if is_read_elsewhere else _load_training_rows(config.data),
        **{name: load_rows(source) for name, source in sources.items()},
    }
    if config.generates_completions:
        selected = ((row.location, row.reward) for rows in rows_by_source.values() for row in rows)
        for problem in find_unknown_rewards(config.reward, selected):
            raise DataError(problem)
    return rows_by_source


def _load_training_rows(data: DataConfig) -> list[Row]:
    return [
        replace(row, source=key) if data.train_sets else row
        for key, source in data.train_sources.items()
        for row in load_rows(source)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """A run's tokenizer, and the rows from all sources."""

    problems: dict[str, list[Row]]
    """Rows by source, as `load_problems` returns them."""
    preferences: dict[str, list[PreferenceRow]]
    """Preference pairs or labeled completions of tasks dpo and rm, by ``train`` and the keys of
    held-out sources; empty in other tasks.
    """
    tokenizer: PreTrainedTokenizerBase
    has_saved_tokenizer: bool
    """True if weights that the run has trained before need this tokenizer."""


def load_run_data(config: TrainerConfig, *, folder: RunFolder, checkpoint: Path | None) -> RunData:
    """Load the rows of all sources, and load the tokenizer or train it on them."""
    problems = load_problems(config)
    kind = config.preference_kind
    preferences: dict[str, list[PreferenceRow]] = {}
    if kind is not None:
        sources = {"train": config.data.train_sources["data.train"], **config.data.eval_sources}
        preferences = {key: load_preferences(each, kind=kind) for key, each in sources.items()}
    # Check this before `load_or_train_tokenizer`, which also saves a new tokenizer in the run
    # folder.
    has_saved_tokenizer = uses_saved_tokenizer(
        folder,
        task=config.task,
        has_warm_start=config.warm_start is not None,
        checkpoint=checkpoint,
    )
    preference_rows = [row for each in preferences.get("train", []) for row in each.rows]
    tokenizer = load_or_train_tokenizer(
        config,
        folder=folder,
        rows=[*problems["train"], *preference_rows, *problems.get("warm_start", [])],
        checkpoint=checkpoint,
    )
    return RunData(
        problems=problems,
        preferences=preferences,
        tokenizer=tokenizer,
        has_saved_tokenizer=has_saved_tokenizer,
    )


def fit_models_to_tokenizer(
    config: TrainerConfig, tokenizer: PreTrainedTokenizerBase, *, trained_model: str | None = None
) -> TrainerConfig:
    """Return the configuration with all models fitted to the tokenizer.

    Models without a path get the vocabulary size and the special tokens of the tokenizer. After a
    warm start, the actor gets the path ``trained_model``, and so does every role that has the
    actor's path and architecture.

    Args:
        config: The configuration.
        tokenizer: Tokenizer of all roles.
        trained_model: Model directory that the warm start wrote; None if it has not ended, or if
            the run has none.

    Raises:
        ConfigError: If a model has fewer rows in its embedding than the tokenizer has tokens.
    """
    actor_model = config.actor.engine.model
    for name, each in config.roles.items():
        _check_vocabulary_size(f"{name}.engine.model", each.engine.model, tokenizer=tokenizer)

    def fit(role: RoleConfig | None) -> RoleConfig | None:
        if role is None:
            return None
        model = role.engine.model
        is_copy = (model.path, model.architecture) == (actor_model.path, actor_model.architecture)
        if trained_model is not None and is_copy:
            # The model directory has its own config.json, so the configured architecture no longer
            # applies.
            model = replace(model, path=trained_model, architecture={})
        elif model.path is None:
            model = _with_vocabulary(model, tokenizer)
        return replace(role, engine=replace(role.engine, model=model))

    def fit_teacher(teacher: TeacherConfig) -> TeacherConfig:
        if teacher.engine.model.path is not None:
            return teacher
        model = _with_vocabulary(teacher.engine.model, tokenizer)
        return replace(teacher, engine=replace(teacher.engine, model=model))

    actor = fit(config.actor)
    assert actor is not None
    return replace(
        config,
        actor=actor,
        critic=fit(config.critic),
        ref=fit(config.ref),
        teachers={name: fit_teacher(teacher) for name, teacher in config.teachers.items()},
    )


def _check_vocabulary_size(
    key: str, model: ModelSpec, *, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that a saved model has an embedding for the tokens of a tokenizer.

    Added tokens may be missing, because some published models never use one of them: the tokenizer
    of Gemma 3 has a token for images, which its text models do not know. A warning names the first.

    Args:
        key: Key of the model.
        model: The model; a folder on another host is not checked.
        tokenizer: The run's tokenizer.

    Raises:
        ConfigError: If the vocabulary, the end token or the padding token does not fit.
    """
    config_file = Path(model.path or "") / "config.json"
    if model.path is None or not config_file.is_file():
        return
    fields = json.loads(config_file.read_text(encoding="utf-8"))
    # Vision-language models have the settings of the text model in text_config.
    size = (fields.get("text_config") or {}).get("vocab_size", fields.get("vocab_size"))
    if not isinstance(size, int):
        return
    may_be_missing = set(tokenizer.get_added_vocab()) - {tokenizer.eos_token, tokenizer.pad_token}
    missing = sorted(
        (index, token) for token, index in tokenizer.get_vocab().items() if index >= size
    )
    if not missing:
        return
    rows = f"vocab_size {size} in {config_file}"
    if any(token not in may_be_missing for _, token in missing):
        raise ConfigError(
            f"{key}.path: the tokenizer in {tokenizer.name_or_path or 'the run'} has token ids up "
            f"to {missing[-1][0]}, but the model has {rows}: set data.tokenizer.path to the "
            "model's own tokenizer, or enlarge the model's embedding."
        )
    logger.warning(
        "%s.path: the tokenizer's token %r has id %d, but the model has %s: the run fails if a "
        "text contains it",
        key,
        missing[0][1],
        missing[0][0],
        rows,
    )


def _with_vocabulary(model: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> ModelSpec:
    num_tokens = len(tokenizer)
    vocab_size = model.architecture.get("vocab_size", num_tokens)
    if not isinstance(vocab_size, int) or vocab_size < num_tokens:
        raise ConfigError(
            f"model.architecture.vocab_size is {vocab_size}, but the tokenizer has {num_tokens} "
            "entries: raise it or leave it out."
        )
    special: dict[str, Scalar] = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    return replace(model, architecture={**special, **model.architecture, "vocab_size": vocab_size})


def get_demonstration_limit(actor_model: ModelSpec, *, max_tokens: int) -> tuple[int, str]:
    """Return the maximum number of tokens per demonstration, and the key that sets it.

    It is the micro-batch limit or the model's number of positions, whichever is smaller.

    Args:
        actor_model: Model of the actor.
        max_tokens: Maximum number of tokens per micro-batch (``batching.max_tokens``).
    """
    positions = actor_model.architecture.get("max_position_embeddings")
    if isinstance(positions, int) and positions < max_tokens:
        return positions, "actor.engine.model.architecture.max_position_embeddings"
    return max_tokens, "batching.max_tokens"


def with_run_length(config: TrainerConfig, *, num_problems: int) -> TrainerConfig:
    """Convert epochs to steps, and set the length of the learning-rate schedules.

    An epoch has as many steps as it has full batches; leftover problems start the next epoch.

    Args:
        config: The configuration.
        num_problems: Number of training prompts in one epoch, without those that are too long.

    Raises:
        DataError: If an epoch has less than one full batch.
    """
    if config.run.total_epochs is not None:
        size = config.batching.prompts_per_step
        if num_problems < size:
            raise DataError(
                describe_short_epoch(config.run, num_problems=num_problems, prompts_per_step=size)
            )
        total_steps = config.run.total_epochs * (num_problems // size)
        run = replace(config.run, total_steps=total_steps, total_epochs=None)
        config = replace(config, run=run)
    # Schedules may count optimizer updates, of which only an RL step has several.
    updates_per_step = (
        config.batching.num_mini_batches * config.batching.num_passes if config.task == "rl" else 1
    )

    def fill_schedule(role: RoleConfig) -> RoleConfig:
        engine = with_schedule_length(
            role.engine, total_steps=config.run.total_steps, updates_per_step=updates_per_step
        )
        return replace(role, engine=engine)

    return replace(
        config,
        actor=fill_schedule(config.actor),
        critic=None if config.critic is None else fill_schedule(config.critic),
    )


def with_schedule_length(
    engine: EngineConfig, *, total_steps: int, updates_per_step: int
) -> EngineConfig:
    """Return the engine, with the length of the run for a schedule of length 0.

    Args:
        engine: Configuration of the engine.
        total_steps: Number of steps in the run.
        updates_per_step: Optimizer updates in a step, for a schedule that advances per update.
    """
    schedule = engine.schedule
    if schedule.total_steps != 0:
        return engine
    length = total_steps * (updates_per_step if schedule.advance == "update" else 1)
    return replace(engine, schedule=replace(schedule, total_steps=length))


def report_dropped(log: RunLog, config: DataConfig, *, phase: str, **counts: int) -> None:
    """Print and log how many rows were dropped for their length, by source."""
    if any(counts.values()):
        log.print_line(
            f"{phase}: dropped rows that are too long (data.max_prompt_tokens = "
            f"{config.max_prompt_tokens}): {counts}"
        )
        metrics = {f"{name}/dropped": float(count) for name, count in counts.items()}
        log.log_metrics(0, metrics, phase=phase)
