"""What a client knows of the teachers: routes and weights, a few hundred bytes, never the configuration of a model."""

from collections.abc import Mapping
from dataclasses import dataclass

from temper_engine_api.errors import ConfigError
from temper_trainer.config.distillation import DistillationConfig, TeacherConfig

MAX_PICKLED_BYTES = 4096
"""Of a spec; a test holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSpec:
    """Teachers by name, for a client."""

    routes: tuple[tuple[str, str], ...]
    """(value of the routing key, name of the teacher)."""
    weights: tuple[tuple[str, float], ...]
    """(name of the teacher, factor of its loss or reward)."""
    top_k: int
    """Likeliest tokens to ask for; 0 asks for none."""
    timeout_s: float
    """Longest wait."""

    def find_teacher(self, route: str) -> str | None:
        """The teacher of a route: the one that names it; the only one there is teaches everything."""
        return dict(self.routes).get(route, self.routes[0][1] if len(self.routes) == 1 else None)

    def get_weight(self, teacher: str) -> float:
        """Factor of a teacher's loss or reward."""
        return dict(self.weights)[teacher]


def build_teacher_spec(
    teachers: Mapping[str, TeacherConfig], config: DistillationConfig
) -> TeacherSpec:
    """The spec of a configuration.

    Raises:
        ConfigError: two teachers have one route.
    """
    routes = tuple(
        (teacher.route if teacher.route is not None else name, name)
        for name, teacher in teachers.items()
    )
    if len(dict(routes)) < len(routes):
        raise ConfigError(
            f"two teachers have one route ({', '.join(f'{name}: {route}' for route, name in routes)}): give each its own."
        )
    return TeacherSpec(
        routes=routes,
        weights=tuple((name, teacher.weight) for name, teacher in teachers.items()),
        top_k=config.top_k if config.needs_top_k else 0,
        timeout_s=config.timeout_s,
    )
