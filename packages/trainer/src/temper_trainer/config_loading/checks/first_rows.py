"""Tokenize the first rows of the data as the run will, and compare them with its limits.

Only `--check` does this. A run does not need it, because it tokenizes all rows before its first
update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from temper_engine_api.errors import ConfigError, TemperError
from temper_trainer.config.data import DatasetsSource, DataSource, PreferenceKind
from temper_trainer.config.run import RunConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.checks.data_files import (
    FirstRows,
    read_first_rows,
    trains_new_tokenizer,
)
from temper_trainer.config_loading.checks.external_checks import preview_checkpoint
from temper_trainer.config_loading.checks.model_folders import (
    iterate_completion_limits,
    read_position_limit,
)
from temper_trainer.types import Prompt

SampleUse = Literal["prompts", "demonstrations"] | PreferenceKind


Sample = tuple[str, SampleUse, FirstRows]
"""The key of a source, for messages, the use of its rows, and the first of them."""


def check_first_rows(config: TrainerConfig) -> None:
    """Check that the run can tokenize the first rows of its data within its limits.

    The run's own functions render and tokenize them with its own tokenizer. Imports transformers,
    which takes seconds, unless the run trains a new tokenizer and no prompt has messages. In that
    case nothing is left to check here, because `find_data_problems` has done all checks that are
    possible without the tokenizer.

    Call `check_external_objects` first.

    Raises:
        ConfigError: If a row cannot be rendered, is too long, or does not fit the tokenizer.
    """
    samples = list(_iterate_samples(config))
    has_messages = config.data.string_prompts == "user_message" or any(
        first.has_messages for _, _, first in samples
    )
    if trains_new_tokenizer(config.data.tokenizer, run=config.run) and not has_messages:
        return
    try:
        problems = list(dict.fromkeys(_find_problems(config, samples)))
    except TemperError as error:  # the tokenizer cannot be loaded or trained
        raise ConfigError(str(error)) from error
    if problems:
        raise ConfigError("\n".join(problems))


def _iterate_samples(config: TrainerConfig) -> Iterator[Sample]:
    """Yield the first rows from each source that the task reads, by their use."""
    trained = list(config.data.train_sources.items())
    all_train: list[tuple[tuple[str, DataSource], SampleUse]] = [
        (item, "prompts") for item in trained
    ]
    eval_use: SampleUse = "demonstrations" if config.task == "sft" else "prompts"
    eval_uses: list[tuple[tuple[str, DataSource], SampleUse]] = [
        (item, config.preference_kind or eval_use) for item in config.data.eval_sources.items()
    ]
    uses: list[tuple[tuple[str, DataSource], SampleUse]]
    match config.task:
        case "sft":
            uses = [(trained[0], "demonstrations"), *eval_uses]
        case "dpo" | "rm":
            assert config.preference_kind is not None
            uses = [(trained[0], config.preference_kind), *eval_uses]
        case "eval" | "generate":
            uses = eval_uses or all_train
        case "rl" | "distill":
            uses = [*all_train, *eval_uses]
            if config.warm_start is not None and not _has_warm_start(config.run):
                own = config.warm_start.data
                source = trained[0] if own is None else ("warm_start.data", own)
                uses.append((source, "demonstrations"))
    for (key, data), use in uses:
        if not isinstance(data, DatasetsSource):
            kind = config.preference_kind if use in ("pairs", "labels") else None
            yield key, use, read_first_rows(data, kind=kind)


def _has_warm_start(config: RunConfig) -> bool:
    """Return True if the run may skip its warm start: its model or a checkpoint exists."""
    folder = Path(config.dir) / "warm_start"
    return (folder / "huggingface").exists() or preview_checkpoint(config) is not None


def _find_problems(config: TrainerConfig, samples: list[Sample]) -> Iterator[str]:
    """Yield what the run would refuse about the first rows.

    Raises:
        TemperError: If there is no tokenizer for them.
    """
    # Imported here, because they import torch and transformers.
    from temper_trainer.data.prompts import (
        encode_demonstrations,
        encode_preferences,
        encode_prompts,
    )
    from temper_trainer.loops.example_batches import TrainingExample, keep_fitting
    from temper_trainer.loops.run.run_folder import RunFolder
    from temper_trainer.loops.run.run_setup import fit_models_to_tokenizer, get_demonstration_limit
    from temper_trainer.loops.run.run_tokenizer import preview_tokenizer

    # A tokenizer is trained on both rows of a preference pair.
    trained_rows = [
        row
        for key, _, first in samples
        if key not in config.data.eval_sources
        for row in [row for each in first.preferences for row in each.rows] or first.rows
    ]
    tokenizer, is_saved = preview_tokenizer(
        config,
        folder=RunFolder(Path(config.run.dir)),
        rows=trained_rows,
        checkpoint=preview_checkpoint(config.run),
    )
    # A new BPE tokenizer learns from all rows, so the lengths are not known from the first ones. A
    # word-level tokenizer makes one token per word, even if it does not know the word.
    has_lengths = is_saved or config.data.tokenizer.kind != "bpe"
    limits = config.data if has_lengths else replace(config.data, max_prompt_tokens=2**31)
    fitted = fit_models_to_tokenizer(config, tokenizer)
    limit = get_demonstration_limit(
        fitted.actor.engine.model, max_tokens=config.batching.max_tokens
    )
    encoded: Sequence[TrainingExample]
    for key, use, first in samples:
        # When there are more rows, a limit may drop all the first ones.
        must_keep = first.is_complete and not config.data.streaming
        # Held-out demonstrations have their own messages_key.
        held_out = config.data.eval_sources.get(key)
        data = limits if held_out is None else replace(limits, train=held_out)
        try:
            match use:
                case "prompts":
                    prompts, _ = encode_prompts(first.rows, tokenizer, data, must_keep=must_keep)
                    if has_lengths:
                        yield from _length_problems(key, prompts, config=config)
                    continue
                case "demonstrations":
                    encoded, _ = encode_demonstrations(
                        first.rows, tokenizer, data, must_keep=must_keep
                    )
                case "pairs" | "labels":
                    encoded, _ = encode_preferences(
                        first.preferences, tokenizer, data, must_keep=must_keep
                    )
            if has_lengths:
                keep_fitting(encoded, max_tokens=limit, config=data, must_keep=must_keep)
        except TemperError as error:
            yield f"{key}: {error}"


def _length_problems(
    name: str, prompts: Sequence[Prompt], *, config: TrainerConfig
) -> Iterator[str]:
    """Yield a message if a prompt with its longest completion is too long for the sampler."""
    positions, reason = read_position_limit(config) or (None, "")
    limits = dict(iterate_completion_limits(config))
    limit_key = "sampling.max_tokens"
    if name in config.data.eval_sources and config.task != "generate":
        limit_key = "run.eval_sampling.max_tokens"
    if positions is None or limit_key not in limits:
        return
    limit = limits[limit_key]
    # Tasks rl and distill cannot drop streamed prompts, so do not advise it.
    remedy = (
        "remove the row"
        if config.data.streaming
        else "drop such prompts with data.max_prompt_tokens and data.overlong_prompts"
    )
    for prompt in prompts:
        if len(prompt.tokens) + limit > positions:
            yield (
                f"{name}: {prompt.location}: the prompt has {len(prompt.tokens)} tokens and "
                f"{limit_key} is {limit}, but {reason}: lower {limit_key}, or {remedy}."
            )
            return  # one is enough
