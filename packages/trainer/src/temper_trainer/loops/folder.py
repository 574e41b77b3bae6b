"""The run folder: its paths, and when it may be used."""

import os
from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.errors import ConfigError
from temper_trainer.config.run import RunConfig
from temper_trainer.config.run_files import START_FILES, UNTRAINED, contains_run
from temper_trainer.metrics.run_files import next_superseded_path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run; nothing of a user's is ever overwritten or deleted here."""

    root: Path
    """``run.dir``."""

    @property
    def checkpoints(self) -> Path:
        """Step directories."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The Hugging Face model directory at the end."""
        return self.root / "huggingface"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that was loaded or trained."""
        return self.root / "tokenizer"

    @property
    def warm_start(self) -> "RunFolder":
        """The warm start's own checkpoints and model."""
        return RunFolder(self.root / "warm_start")

    @property
    def contains_run(self) -> bool:
        """Whether a run has trained here; see `temper_trainer.config.folder.contains_run`."""
        return contains_run(self.root)

    def set_model_aside(self) -> None:
        """Rename the model of an earlier end to `NAME.superseded-N`, so that it is not taken for the last one."""
        if self.model.exists():
            self.model.rename(next_superseded_path(self.model))

    def mark_trained(self) -> None:
        """Record that the run has results: from now on, only `run.resume` continues in this folder."""
        (self.root / UNTRAINED).unlink(missing_ok=True)


def open_folder(run: RunConfig) -> RunFolder:
    """Return the folder of a run; the caller holds its lock.

    What a start left that failed before its first step is renamed to `NAME.superseded-N`, so that
    the corrected command finds no half-written tokenizer and no configuration of another run.
    Nothing is deleted: a user may have put files there meanwhile.

    Raises:
        ConfigError: If the folder holds a run and `run.resume` is never, or if `checkpoints` is no
            folder.
    """
    folder = RunFolder(Path(run.dir))
    if os.path.lexists(folder.checkpoints) and not folder.checkpoints.is_dir():
        kind = "a file" if folder.checkpoints.exists() else "a link to nothing"
        raise ConfigError(
            f"{folder.checkpoints} is {kind}, but must be a folder for checkpoints: rename or remove it."
        )
    if folder.contains_run:
        if run.resume == "never":
            raise ConfigError(
                f"run.dir {run.dir} already holds a run: go on with run.resume=auto, or choose another run.dir."
            )
        return folder
    marker = folder.root / UNTRAINED
    if marker.exists():
        present = [path for name in START_FILES if (path := folder.root / name).exists()]
        for path in present:
            path.rename(next_superseded_path(path))
    marker.touch()
    return folder
