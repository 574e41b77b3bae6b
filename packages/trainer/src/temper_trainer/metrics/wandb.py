"""Tracker ``wandb``: Weights & Biases, an extra of temper-trainer."""

from collections.abc import Mapping
from pathlib import Path

from temper_engine_api.errors import ConfigError
from temper_trainer.metrics.records import PHASES, Phase


class WandbTracker:
    """One wandb run, named after the run folder; a resumed folder goes on with the same wandb run."""

    def __init__(self, directory: Path) -> None:
        try:
            import wandb  # noqa: PLC0415  (an extra)
        except ImportError as error:
            raise ConfigError(
                "run.trackers names wandb, which is not installed: pip install 'temper-trainer[wandb]', or take it out of run.trackers."
            ) from error
        self._run = wandb.init(project="temper", name=directory.name, dir=str(directory), id=_run_id(directory), resume="allow")
        for phase in PHASES:
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def log(self, step: int, metrics: Mapping[str, float], *, phase: Phase) -> None:
        """Send one row, each phase with its own axis of steps."""
        self._run.log({f"{phase}/step": step} | {f"{phase}/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        """Finish the run and wait for the upload."""
        self._run.finish()


def _run_id(directory: Path) -> str:
    path = directory / "wandb_id.txt"
    if not path.exists():
        import wandb  # noqa: PLC0415  (an extra)

        path.write_text(wandb.util.generate_id(), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
