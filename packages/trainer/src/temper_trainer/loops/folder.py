"""The run folder: what lies where, and when it may be used."""

from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.errors import ConfigError
from temper_trainer.config.folder import holds_run
from temper_trainer.config.run import RunConfig
from temper_trainer.metrics.records import superseded_name


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
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return holds_run(self.root)

    def set_model_aside(self) -> None:
        """Before training goes on: an earlier end's model becomes ``NAME.superseded-N``, so that it is not taken for the last one."""
        if self.model.exists():
            self.model.rename(superseded_name(self.model))


def open_folder(run: RunConfig) -> RunFolder:
    """The folder of a run, made where it does not exist.

    Raises:
        ConfigError: it holds a run and ``run.resume`` is never; or it is a file.
    """
    folder = RunFolder(Path(run.dir))
    if folder.root.exists() and not folder.root.is_dir():
        raise ConfigError(f"run.dir {run.dir} is a file: choose a folder.")
    if folder.holds_run and run.resume == "never":
        raise ConfigError(f"run.dir {run.dir} already holds a run: go on with run.resume=auto, or choose another run.dir.")
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir {run.dir} can't be made: {error.strerror}. Choose a folder that you may write to.") from error
    return folder
