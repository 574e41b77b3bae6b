"""Create a run's teachers."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.sampler import Replica
from temper_trainer.runtime.engine_teacher import EngineTeacher
from temper_trainer.runtime.placement import format_teacher_role
from temper_trainer.runtime.vllm_teacher import build_vllm_teacher
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.teacher.teacher_client import TeacherClient, build_teacher_spec
from temper_trainer.teacher.teacher_protocol import Teacher
from temper_trainer.teacher.token_map import TokenMap, build_token_map


class GroupFactory(Protocol):
    """The method of a runtime that models on engines need."""

    def open_group(
        self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False
    ) -> WorkerGroup:
        """Create the ranks of one role, not yet initialized."""
        ...


class TeacherRuntime(GroupFactory, Protocol):
    """The methods of a runtime that teachers need."""

    def make_teacher_servers(self, name: str, config: TrainerConfig) -> Sequence[Replica]:
        """Create the servers of a teacher with backend vllm, not yet started."""
        ...


def build_teachers(
    config: TrainerConfig, *, runtime: TeacherRuntime, tokenizer: PreTrainedTokenizerBase
) -> TeacherClient | None:
    """Build every teacher of a run and its token map; return None if there is no teacher.

    If one fails, those built before it are closed.

    Raises:
        ConfigError: If a tokenizer differs and may not be mapped, or a backend is not installed.
    """
    if not config.teachers:
        return None
    may_map = config.distillation.tokenizer_mismatch == "map"
    maps: dict[str, TokenMap] = {}
    teachers: dict[str, Teacher] = {}
    with ExitStack() as stack:
        # All tokenizers first: a wrong one is found before any model is loaded.
        for name, teacher in config.teachers.items():
            token_map = _load_token_map(name, teacher, may_map=may_map, tokenizer=tokenizer)
            if token_map is not None:
                maps[name] = token_map
        for name, teacher in config.teachers.items():
            vocab_size = len(maps[name].teacher_to_policy) if name in maps else len(tokenizer)
            if teacher.backend == "vllm":
                teachers[name] = build_vllm_teacher(
                    name,
                    config,
                    replicas=runtime.make_teacher_servers(name, config),
                    vocab_size=vocab_size,
                )
            else:
                teachers[name] = _build_engine_teacher(
                    name,
                    teacher,
                    max_tokens=config.batching.max_tokens,
                    runtime=runtime,
                    vocab_size=vocab_size,
                )
            stack.callback(teachers[name].close)
        # All are built: from here on the client closes them, not the stack.
        stack.pop_all()
    return TeacherClient(
        spec=build_teacher_spec(config.teachers, config.distillation),
        teachers=teachers,
        token_maps=maps,
    )


def _build_engine_teacher(
    name: str,
    teacher: TeacherConfig,
    *,
    max_tokens: int,
    runtime: GroupFactory,
    vocab_size: int,
) -> EngineTeacher:
    replicas: list[WorkerGroup] = []
    with ExitStack() as stack:
        for replica in range(teacher.num_replicas):
            group = runtime.open_group(
                format_teacher_role(name, replica),
                engine=replace(teacher.engine, optimizer=None),
                num_workers=teacher.num_workers,
            )
            stack.callback(group.close)
            group.init()
            replicas.append(group)
        # All are built: from here on the teacher closes them, not the stack.
        stack.pop_all()
    return EngineTeacher(name, replicas=replicas, max_tokens=max_tokens, vocab_size=vocab_size)


def _load_token_map(
    name: str, teacher: TeacherConfig, *, may_map: bool, tokenizer: PreTrainedTokenizerBase
) -> TokenMap | None:
    """Return a teacher's token map; None if it has the policy's tokenizer."""
    path = teacher.engine.model.path
    if path is None:  # a model from scratch uses the policy's tokenizer
        return None
    if not any(
        (Path(path) / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ConfigError(
            f"teachers.{name}.engine.model.path {path} has no tokenizer, so its tokens cannot be "
            "compared with the policy's: copy the tokenizer's files there."
        )
    teacher_tokenizer = AutoTokenizer.from_pretrained(path)
    return build_token_map(tokenizer, teacher_tokenizer, name=name, may_map=may_map)
