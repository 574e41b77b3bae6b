"""Tracker ``wandb``: Weights & Biases, an extra of temper-trainer."""

import secrets
from collections.abc import Mapping
from pathlib import Path

from temper_engine_api.errors import ConfigError


class WandbTracker:
    """One wandb run, named after the run folder; a resumed folder goes on with the same wandb run."""

    def __init__(self, directory: Path) -> None:
        try:
            import wandb  # an extra
        except ImportError as error:
            raise ConfigError(
                "run.trackers names wandb, which is not installed: pip install 'temper-trainer[wandb]', or take it out of run.trackers."
            ) from error
        id_file = directory / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        run_id = id_file.read_text(encoding="utf-8").strip()
        self._run = wandb.init(
            project="temper", name=directory.name, dir=str(directory), id=run_id, resume="allow"
        )
        self._phases: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Send one row, each phase with its own axis of steps."""
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log(
            {f"{phase}/step": step} | {f"{phase}/{name}": value for name, value in metrics.items()}
        )

    def begin_anew(self) -> None:
        """Wandb can take nothing back: its history has those steps twice, the later ones after the earlier."""

    def close(self, *, has_failed: bool) -> None:
        """Finish the run and wait for the upload."""
        self._run.finish(exit_code=int(has_failed))
