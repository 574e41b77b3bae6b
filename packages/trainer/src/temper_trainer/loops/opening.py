"""From a configuration to open rooms: tokenizer, problems, models that fit the tokenizer, roles, sampler."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig, ModelSpec, Scalar
from temper_trainer.checkpoint.checkpointer import Checkpointer, load_run_id
from temper_trainer.config.data import SourceConfig
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.run import RoleConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.rows import Row
from temper_trainer.data.sources import load_rows
from temper_trainer.data.tokenizer import build_tokenizer
from temper_trainer.loops.folder import RunFolder
from temper_trainer.runtime.checkpoint_verification import make_checkpoint_verifier


def open_checkpointer(config: TrainerConfig, *, folder: RunFolder) -> Checkpointer:
    """Return the checkpoints of a run folder, or of its warm start's, under the settings of the run."""
    run = config.run
    return Checkpointer(
        root=folder.checkpoints,
        max_to_keep=run.max_ckpt_to_keep,
        keep_every=run.keep_every,
        run_id=load_run_id(Path(run.dir)),
        verify=make_checkpoint_verifier(config),
    )


def load_problems(config: TrainerConfig) -> dict[str, list[Row]]:
    """Rows of the training, held-out and warm-start sources by those names; the last two may be absent.

    Streamed rows and pairs are not among them: they are read by those who know what they are.
    """
    is_read_later = config.data.streaming or config.task in ("dpo", "rm")
    sources: dict[str, SourceConfig | None] = {
        "train": None if is_read_later else config.data.train,
        "eval": config.data.eval,
    }
    if config.warm_start is not None and config.warm_start.data is not None:
        sources["warm_start"] = config.warm_start.data
    return {
        "train": [],
        **{name: load_rows(source) for name, source in sources.items() if source is not None},
    }


def open_tokenizer(
    config: TrainerConfig, *, folder: RunFolder, rows: Sequence[Row]
) -> PreTrainedTokenizerBase:
    """The run's tokenizer: the one that an earlier start of this run saved, else loaded or trained now."""
    texts = [
        config.data.prompt_template.replace("{prompt}", ""),
        *(text for row in rows for text in row.texts),
    ]
    return build_tokenizer(
        config.data.tokenizer,
        model_path=config.actor.engine.model.path,
        texts=texts,
        directory=folder.tokenizer,
    )


def fit_models(
    config: TrainerConfig, tokenizer: PreTrainedTokenizerBase, *, trained_model: str | None = None
) -> TrainerConfig:
    """The configuration with every role's model fitted to the tokenizer.

    Args:
        config: as composed.
        tokenizer: gives vocabulary and special tokens to models that start from scratch.
        trained_model: directory of a warm start's result, from which roles that would start from scratch begin instead.
    """

    def fit(role: RoleConfig | None) -> RoleConfig | None:
        if role is None or role.engine.model.path is not None:
            return role
        if trained_model is not None:
            model = replace(role.engine.model, path=trained_model, architecture={})
        else:
            model = _with_vocabulary(role.engine.model, tokenizer)
        return replace(role, engine=replace(role.engine, model=model))

    actor = fit(config.actor)
    assert actor is not None
    return replace(
        config,
        actor=actor,
        critic=fit(config.critic),
        ref=fit(config.ref),
        teachers=_fit_teachers(config, tokenizer),
    )


def _fit_teachers(
    config: TrainerConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, TeacherConfig]:
    """Teachers from scratch with the tokenizer's vocabulary; those of a directory as they are."""
    return {
        name: teacher
        if teacher.engine.model.path is not None
        else replace(
            teacher,
            engine=replace(teacher.engine, model=_with_vocabulary(teacher.engine.model, tokenizer)),
        )
        for name, teacher in config.teachers.items()
    }


def longest_demonstration(config: TrainerConfig) -> tuple[int, str]:
    """Tokens that a demonstration may have, and the key that says so: the cap of a micro-batch, or the model's positions."""
    positions = config.actor.engine.model.architecture.get("max_position_embeddings")
    if isinstance(positions, int) and positions < config.batching.max_tokens:
        return positions, "actor.engine.model.architecture.max_position_embeddings"
    return config.batching.max_tokens, "batching.max_tokens"


def with_training(engine: EngineConfig, config: TrainerConfig) -> EngineConfig:
    """The actor's engine with the warm start's own optimiser and schedule."""
    assert config.warm_start is not None
    return replace(
        engine, optimizer=config.warm_start.optimizer, schedule=config.warm_start.schedule
    )


def _with_vocabulary(model: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> ModelSpec:
    size = len(tokenizer)
    asked = model.architecture.get("vocab_size", size)
    if not isinstance(asked, int) or asked < size:
        raise ConfigError(
            f"model.architecture.vocab_size is {asked}, but the tokenizer has {size} entries: raise it or leave it out."
        )
    special: dict[str, Scalar] = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    return replace(model, architecture={**special, **model.architecture, "vocab_size": asked})
