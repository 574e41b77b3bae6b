"""Choose a run's tokenizer: the saved one if weights were trained with it, or a new one.

Weights fit one tokenizer's ids. A tokenizer trained on changed data may have the same number of
entries in a different order, which no shape check detects. Each checkpoint therefore records its
tokenizer's digest.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_engine_api.checkpoint import list_step_entries, set_aside
from temper_engine_api.errors import CheckpointError, DamagedCheckpointError
from temper_trainer.checkpoint.step_contents import read_tokenizer_digest
from temper_trainer.config.run import INFERENCE_TASKS
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.rows import Row
from temper_trainer.data.tokenizer import (
    check_texts,
    compute_tokenizer_digest,
    load_or_train,
    load_saved_tokenizer,
    save_tokenizer,
)
from temper_trainer.loops.run.run_folder import RunFolder
from temper_trainer.metrics.run_files import choose_superseded_path

logger = logging.getLogger(__name__)


def uses_saved_tokenizer(
    folder: RunFolder, *, task: str, has_warm_start: bool, checkpoint: Path | None
) -> bool:
    """Return True if the run starts from weights that it has trained before.

    These weights need the saved tokenizer. They come from the checkpoint, or from a warm start that
    has saved a model or a checkpoint.

    Args:
        folder: The run folder.
        task: Task of the run.
        has_warm_start: True if the run has a warm start.
        checkpoint: Checkpoint from which the run resumes.
    """
    if task in INFERENCE_TASKS:  # these tasks restore no checkpoint
        return False
    warm_start = folder.warm_start
    return checkpoint is not None or (
        has_warm_start
        and (warm_start.model.exists() or bool(list_step_entries(warm_start.checkpoints)))
    )


def load_or_train_tokenizer(
    config: TrainerConfig, *, folder: RunFolder, rows: Sequence[Row], checkpoint: Path | None = None
) -> PreTrainedTokenizerBase:
    """Return a run's tokenizer, and save it in the run folder.

    A run that continues with trained weights uses the tokenizer that was saved with them, whatever
    ``data.tokenizer`` says. The checkpoint records the tokenizer's digest. If the saved tokenizer
    is damaged or has another digest, it is renamed, and a new one is built from
    ``data.tokenizer``. The new one must have the recorded digest.

    Args:
        config: The configuration.
        folder: The run folder.
        rows: Rows whose texts a new tokenizer is trained on.
        checkpoint: Checkpoint from which the run resumes, written by this run or another one.

    Raises:
        CheckpointError: If the tokenizer of the weights is lost.
        DataError: If the tokenizer cannot represent a text.
        ConfigError: If a new tokenizer cannot be built from ``data.tokenizer``.
    """
    texts, build = _prepare(config, rows)
    has_warm_start = config.warm_start is not None
    if not uses_saved_tokenizer(
        folder, task=config.task, has_warm_start=has_warm_start, checkpoint=checkpoint
    ):
        tokenizer = build()
        _replace_saved(tokenizer, folder.tokenizer)
        return tokenizer
    expected = _read_expected_digest(folder, checkpoint)
    usable, problems = _find_saved(folder, checkpoint, expected=expected)
    if usable is None:
        return _build_again(build, folder=folder, expected=expected, problems=problems)
    directory, saved = usable
    check_texts(saved, texts, directory=directory)
    if directory != folder.tokenizer:
        _replace_saved(saved, folder.tokenizer)
    return saved


def preview_tokenizer(
    config: TrainerConfig, *, folder: RunFolder, rows: Sequence[Row], checkpoint: Path | None
) -> tuple[PreTrainedTokenizerBase, bool]:
    """Return the tokenizer of `load_or_train_tokenizer`, without writing or renaming anything.

    For the arguments and errors see there.

    Returns:
        The tokenizer, and whether it is a saved one. The run itself would build the same new one if
        the tokenizer is pretrained, or if ``rows`` contains all rows of the run.
    """
    texts, build = _prepare(config, rows)
    has_warm_start = config.warm_start is not None
    if uses_saved_tokenizer(
        folder, task=config.task, has_warm_start=has_warm_start, checkpoint=checkpoint
    ):
        expected = _read_expected_digest(folder, checkpoint)
        usable, _ = _find_saved(folder, checkpoint, expected=expected)
        if usable is not None:
            directory, saved = usable
            check_texts(saved, texts, directory=directory)
            return saved, True
    return build(), False


def _prepare(
    config: TrainerConfig, rows: Sequence[Row]
) -> tuple[list[str], Callable[[], PreTrainedTokenizerBase]]:
    """Return the texts that the tokenizer must represent, and a function to train it on them."""
    texts = [
        # The words of the template are tokenized in every prompt, so they must be learned, too.
        config.data.prompt_template.replace("{prompt}", ""),
        *(text for row in rows for text in row.texts),
    ]
    build = partial(
        load_or_train,
        config.data.tokenizer,
        model_path=config.actor.engine.model.path,
        texts=texts,
    )
    return texts, build


def _find_saved(
    folder: RunFolder, checkpoint: Path | None, *, expected: str | None
) -> tuple[tuple[Path, PreTrainedTokenizerBase] | None, list[str]]:
    """Return the first usable saved tokenizer with its folder, and the problems of the others."""
    problems = []
    for directory in _list_saved_tokenizers(folder, checkpoint):
        try:
            saved = load_saved_tokenizer(directory)
        except DamagedCheckpointError as error:
            problems.append(str(error))
            continue
        if expected in (None, compute_tokenizer_digest(saved)):
            return (directory, saved), problems
        problems.append(f"the tokenizer in {directory} has another digest than the weights.")
    return None, problems


def _replace_saved(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Save a tokenizer; rename any other tokenizer that is already there."""
    if directory.exists():
        try:
            saved = load_saved_tokenizer(directory)
        except DamagedCheckpointError:
            set_aside(directory, "damaged")
        else:
            if compute_tokenizer_digest(saved) != compute_tokenizer_digest(tokenizer):
                directory.rename(choose_superseded_path(directory))
    save_tokenizer(tokenizer, directory)


def _build_again(
    build: Callable[[], PreTrainedTokenizerBase],
    *,
    folder: RunFolder,
    expected: str | None,
    problems: Sequence[str],
) -> PreTrainedTokenizerBase:
    """Build the tokenizer of existing weights a second time.

    Args:
        build: Builds it from ``data.tokenizer``.
        folder: The run folder.
        expected: Digest that it must have; None if the weights record none.
        problems: What is wrong with the saved ones; empty if there are none.
    """
    description = " ".join(problems) or f"there is no tokenizer in {folder.tokenizer}."
    if expected is None and problems:
        raise CheckpointError(
            f"{description} The checkpoint was saved by an older version and records no digest, so "
            "a tokenizer that is built again could not be compared: restore the folder from a "
            "backup. If the training data and data.tokenizer are those of the first start, rename "
            "the folder instead, and the run builds the tokenizer again."
        )
    logger.warning("%s It is built again from data.tokenizer.", description)
    tokenizer = build()
    if expected not in (None, compute_tokenizer_digest(tokenizer)):
        raise CheckpointError(
            f"{description} The one that is built from the present data and data.tokenizer is not "
            "that of the weights, either: restore the folder from a backup, or restore the "
            "training data and data.tokenizer of the run's first start."
        )
    if folder.tokenizer.exists():
        renamed = set_aside(folder.tokenizer, "damaged")
        logger.warning(
            "the tokenizer in %s was replaced: renamed to %s", folder.tokenizer, renamed.name
        )
    save_tokenizer(tokenizer, folder.tokenizer)
    return tokenizer


def _list_saved_tokenizers(folder: RunFolder, checkpoint: Path | None) -> Iterator[Path]:
    """Yield where the tokenizer of the weights may be saved, the most likely folder first."""
    if checkpoint is not None and checkpoint.parent.name == folder.checkpoints.name:
        source = RunFolder(checkpoint.parent.parent)
        # The weights come from the checkpoint, so its run's tokenizer counts first.
        if source.root.resolve() != folder.root.resolve() and source.tokenizer.exists():
            yield source.tokenizer
    if folder.tokenizer.exists():
        yield folder.tokenizer


def _read_expected_digest(folder: RunFolder, checkpoint: Path | None) -> str | None:
    """Return the digest of the tokenizer that the weights were trained with, if it is known."""
    if checkpoint is not None:
        return read_tokenizer_digest(checkpoint)
    warm_start = folder.warm_start
    for _, step in sorted(list_step_entries(warm_start.checkpoints).items(), reverse=True):
        try:
            return read_tokenizer_digest(step)
        except DamagedCheckpointError:
            continue  # the warm start skips this checkpoint, too
    if not warm_start.model.exists():
        return None
    # Its checkpoints were deleted, but the model is saved with its tokenizer.
    try:
        return compute_tokenizer_digest(load_saved_tokenizer(warm_start.model))
    except DamagedCheckpointError as error:
        logger.warning("the run's tokenizer cannot be compared with that of its weights: %s", error)
        return None
