"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from temper_trainer.progress import track_progress


@dataclass(slots=True)
class StepClock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the body's wall time to a phase."""
        begin = time.perf_counter()
        try:
            with track_progress(name.replace("_", " ")):
                yield
        finally:
            self.seconds[f"time/{name}_s"] = (
                self.seconds.get(f"time/{name}_s", 0.0) + time.perf_counter() - begin
            )
