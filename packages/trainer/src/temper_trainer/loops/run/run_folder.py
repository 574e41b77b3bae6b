"""The run folder: its paths, whether a run may use it, and the exported model."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_engine_api.checkpoint import set_aside
from temper_engine_api.checkpoint.transaction import write_durably
from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig, ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_trainer.checkpoint.huggingface_export import write_model_directory
from temper_trainer.checkpoint.weight_files import find_damaged_model
from temper_trainer.config.run import RunConfig
from temper_trainer.config.run_folder_checks import (
    START_FILES,
    UNTRAINED,
    contains_run,
    find_wrong_entries,
)
from temper_trainer.metrics.run_files import choose_superseded_path, read_settings
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.weight_sync.buckets import (
    WeightExporter,
    copy_to_cpu,
    participate_in_export,
)

logger = logging.getLogger(__name__)

TRAINED_CONFIG = ".trained_config.yaml"
"""Copy of `config.yaml` from the last start that completed a step, until a later one has."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths in a run folder.

    Existing files are renamed, never overwritten or deleted: users may have put their own there.
    """

    root: Path
    """Folder that ``run.dir`` names."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the step directories."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """Hugging Face model directory that the run writes at its end."""
        return self.root / "huggingface"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that was loaded or trained."""
        return self.root / "tokenizer"

    @property
    def warm_start(self) -> "RunFolder":
        """Subfolder with the checkpoints and the model of the warm start."""
        return RunFolder(self.root / "warm_start")

    @property
    def contains_run(self) -> bool:
        """True if a run has trained here; see `run_folder_checks.contains_run`."""
        return contains_run(self.root)

    def supersede_model(self) -> None:
        """Rename the model of an earlier start to ``NAME.superseded-N``.

        A run that trains on would otherwise leave an outdated model until it writes the new one.
        One that ends at an earlier step would keep the model of a later one.
        """
        if os.path.lexists(self.model):  # also a link to a disk that is not mounted
            self.model.rename(choose_superseded_path(self.model))

    def read_trained_settings(self) -> dict[str, object]:
        """Return the settings of the last start that completed a step; empty without one."""
        kept = (self.root / TRAINED_CONFIG).exists()
        return read_settings(self.root, name=TRAINED_CONFIG if kept else "config.yaml")

    @contextmanager
    def keep_trained_settings(self) -> Iterator[None]:
        """Keep a copy of the configuration that the body replaces, until `mark_used`.

        If this start fails before its first step, the next start can still read the settings of the
        run that wrote the checkpoint.
        """
        config, kept = self.root / "config.yaml", self.root / TRAINED_CONFIG
        before = config.read_bytes() if config.is_file() else None
        yield
        if before is not None and not kept.exists() and config.read_bytes() != before:
            # A damaged file may not be UTF-8.
            write_durably(kept, before.decode(errors="replace"))

    def mark_used(self) -> None:
        """Record that this start has results.

        From now on, only `run.resume` continues the folder, and its settings are those with which
        the run was trained.
        """
        (self.root / UNTRAINED).unlink(missing_ok=True)
        (self.root / TRAINED_CONFIG).unlink(missing_ok=True)


def open_run_folder(run: RunConfig) -> RunFolder:
    """Check that a run may use its folder, and return it. The caller must hold its lock.

    Files of a start that failed before its first step are renamed to ``NAME.superseded-N``.
    Otherwise the corrected command would use an incomplete tokenizer or another configuration.

    Raises:
        ConfigError: If the folder holds a run and ``run.resume`` is never, or a file of it
            is a folder, or the reverse.
    """
    folder = RunFolder(Path(run.dir))
    if problems := list(find_wrong_entries(folder.root)):
        raise ConfigError("\n".join(problems))
    if folder.contains_run:
        if run.resume == "never":
            raise ConfigError(
                f"run.dir {run.dir} already holds a run: continue it with run.resume=auto, or "
                "choose another run.dir."
            )
        return folder
    marker = folder.root / UNTRAINED
    if marker.exists():
        present = [path for name in START_FILES if (path := folder.root / name).exists()]
        for path in present:
            path.rename(choose_superseded_path(path))
    # Until `mark_used` removes it, another start may use the folder.
    marker.touch()
    return folder


def set_aside_damaged_model(model: Path) -> str | None:
    """Rename a model directory if a file in it is damaged.

    Content is not compared: there are no checksums of an exported model, and users may edit it.

    Returns:
        The damage and the new name, as in "is damaged (...): renamed to ..."; None for a complete
        model.
    """
    damage = find_damaged_model(model)
    if damage is None:
        return None
    renamed = set_aside(model, "damaged")
    return f"is damaged ({damage.rpartition(': ')[0]}): renamed to {renamed.name}"


def export_model(
    group: WorkerGroup, *, engine: EngineConfig, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Write the current weights of a group as a Hugging Face model directory.

    The first rank writes it while it exports the weights, so no process has all weights in memory.

    Args:
        group: Workers of the role.
        engine: The role's engine configuration.
        tokenizer: Saved with the weights.
        directory: Directory to write. A complete model in it is kept; anything else is renamed.
    """
    if os.path.lexists(directory):
        description = set_aside_damaged_model(directory)
        if description is None:
            return
        logger.warning("the model in %s %s, and written again", directory, description)
    # Absolute, because a rank may have another working directory.
    group.run_on_all(write_exported_model, engine.model, tokenizer, directory.absolute())


def write_exported_model(
    worker: WeightExporter, model: ModelSpec, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Write the worker's weights as a model directory on rank 0; runs on every rank.

    Raises:
        CheckpointError: See `write_model_directory`.
    """
    if not worker.is_first:
        participate_in_export(worker)
        return
    with worker.export_weights() as stream:
        try:
            # Copied, because the stream may reuse its memory for the next tensor.
            weights = (NamedWeight(name, copy_to_cpu(tensor)) for name, tensor in stream)
            write_model_directory(weights, model=model, tokenizer=tokenizer, directory=directory)
        finally:
            # After an error too: the other ranks wait in collectives for every tensor.
            for _ in stream:
                pass
