"""Check that the data files of a configuration exist and that their first rows are usable."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from temper_engine_api.errors import TemperError
from temper_trainer.config.data import (
    ArithmeticSource,
    DataSource,
    FileSource,
    PreferenceKind,
    RecordSource,
    TokenizerConfig,
)
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.run import INFERENCE_TASKS, RunConfig, describe_short_epoch
from temper_trainer.config.run_folder_checks import contains_run
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.checks.model_folders import has_chat_template
from temper_trainer.data.arithmetic import generate_arithmetic_rows
from temper_trainer.data.loss_weights import describe_missing_weights
from temper_trainer.data.rows import PreferenceRow, Row, describe_missing_label
from temper_trainer.data.sources import count_rows, iterate_preferences, iterate_rows
from temper_trainer.reward.registry import find_unknown_rewards

NUM_CHECKED_ROWS = 100
"""Rows to check per file. The run checks all rows; these find a wrong key or format in
milliseconds.
"""

NO_TEMPLATE = (
    "the tokenizer has no chat template: set data.chat_template, or give a tokenizer that has one."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """A source's first rows."""

    rows: tuple[Row, ...]
    """The rows; for a pair, the row of the preferred completion."""
    preferences: tuple[PreferenceRow, ...]
    """Pairs or labeled completions of tasks dpo and rm."""
    is_complete: bool
    """True if the source has no other rows that the run reads."""

    @property
    def has_messages(self) -> bool:
        """True if a prompt is a list of chat messages."""
        return any(not isinstance(row.prompt, str) for row in self.rows)


def find_data_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield problems with local data files; remote paths are left to the run."""
    problems = list(_find_source_problems(config))
    yield from problems
    if config.run.total_epochs is not None and not problems:
        num_rows, needed = count_training_rows(config), config.batching.prompts_per_step
        if num_rows is not None and num_rows < needed:
            yield describe_short_epoch(config.run, num_problems=num_rows, prompts_per_step=needed)
    if config.data.string_prompts == "user_message" and not has_chat_template(
        config.data, model_path=config.actor.engine.model.path
    ):
        yield f"data.string_prompts is user_message, but {NO_TEMPLATE}"
    tools = config.data.tools_path
    if tools is not None and not Path(tools).is_file():
        yield (
            f"data.tools_path is {tools}, which is not a file (relative to {Path.cwd()}): correct "
            "the path."
        )


def _find_source_problems(config: TrainerConfig) -> Iterator[str]:
    for name, source in config.sources.items():
        if isinstance(source, FileSource):
            yield from _source_problems(name, source, config=config)
        elif isinstance(source, ArithmeticSource):
            first = read_first_rows(source, kind=None)
            yield from _tokenizer_problems(name, first.rows, config=config)


def count_training_rows(config: TrainerConfig) -> int | None:
    """Return the number of rows of the training data, counted up to those of one step.

    Call it once the sources have no problem.

    Returns:
        None if it is not known before the run, or if a step is not a number of rows.
    """
    if config.task in INFERENCE_TASKS or config.batching.tokens_per_update is not None:
        return None
    limit, num_rows = config.batching.prompts_per_step, 0
    for source in config.data.train_sources.values():
        if isinstance(source, ArithmeticSource):
            num_rows += source.max_rows
        elif isinstance(source, FileSource) and all(Path(path).is_file() for path in source.paths):
            num_rows += count_rows(source, limit=limit)
        else:
            return None
    return min(num_rows, limit)


def trains_new_tokenizer(tokenizer: TokenizerConfig, *, run: RunConfig) -> bool:
    """Return True if the run trains its tokenizer, because its folder has no weights yet."""
    is_new = run.resume == "never" or (run.resume == "auto" and not contains_run(Path(run.dir)))
    return is_new and tokenizer.kind != "pretrained"


def is_remote(path: str) -> bool:
    """Return True if a path is an fsspec URL, which only a run reads."""
    return "://" in path or "::" in path


def _source_problems(name: str, source: FileSource, *, config: TrainerConfig) -> Iterator[str]:
    local = [path for path in source.paths if not is_remote(path)]
    absent = [path for path in local if not Path(path).is_file()]
    for path in absent:
        yield (
            f"{name}.paths names {path}, which is not a file (relative to {Path.cwd()}): "
            f"{_suggest_path(path)}."
        )
    present = tuple(path for path in local if path not in absent)
    if not present:
        return
    try:
        first = read_first_rows(replace(source, paths=present), kind=config.preference_kind)
    except TemperError as error:
        yield f"{name}: {error}"
        return
    if len(present) == len(source.paths):
        if not first.rows:
            yield f"{name}.paths is [{source.location}], which has no rows: give files with rows."
        if first.is_complete:
            if problem := describe_missing_label(first.preferences, config=source):
                yield f"{name}: {problem}"
            if first.rows and (problem := describe_missing_weights(first.rows, config=source)):
                yield f"{name}: {problem}"
    if first.has_messages and not has_chat_template(
        config.data, model_path=config.actor.engine.model.path
    ):
        yield f"{name} has chat messages, but {NO_TEMPLATE}"
    if name in config.data.train_sources and len(config.teachers) > 1 and source.route_key:
        routes = frozenset(row.route for row in first.rows)
        yield from _route_problems(routes, name=name, source=source, teachers=config.teachers)
    if source.reward_key is not None and config.generates_completions:
        selected = [(row.location, row.reward) for row in first.rows]
        # One is enough.
        yield from islice(find_unknown_rewards(config.reward, selected), 1)
    # The run trains no tokenizer on a stream.
    if not config.data.streaming:
        yield from _tokenizer_problems(name, first.rows, config=config)


@functools.cache  # several checks read the rows of the same sources
def _generate_rows(source: ArithmeticSource) -> tuple[Row, ...]:
    return tuple(generate_arithmetic_rows(source))


def _suggest_path(path: str) -> str:
    if Path(path).is_dir():
        return "it is a folder, list its files"
    if "*" in path:
        return "patterns are not expanded, list the files"
    return "correct the path"


def read_first_rows(source: DataSource, *, kind: PreferenceKind | None) -> FirstRows:
    """Read the first rows of each local file of a source with the run's own reader.

    Args:
        source: The source; of files on remote hosts nothing is read.
        kind: Form of the rows in tasks dpo and rm.

    Raises:
        DataError: If a row cannot be read; the message is the run's.
    """
    rows: list[Row] = []
    preferences: list[PreferenceRow] = []
    left, is_complete = source.max_rows, True
    parts = (
        [replace(source, paths=(path,)) for path in source.paths]
        if isinstance(source, FileSource)
        else [source]
    )
    for part in parts:
        if isinstance(part, FileSource) and is_remote(part.paths[0]):
            is_complete = False
            continue
        limit = NUM_CHECKED_ROWS if left is None else min(NUM_CHECKED_ROWS, left)
        part, num_before = replace(part, max_rows=limit), len(rows)
        if kind is not None and isinstance(part, RecordSource):
            preferences += iterate_preferences(part, kind=kind)
            rows = [each.rows[0] for each in preferences]
        elif isinstance(part, ArithmeticSource):
            rows += _generate_rows(part)
        else:
            rows += iterate_rows(part)
        num_read = len(rows) - num_before
        if left is not None:
            left -= num_read
            if left == 0:
                break
        is_complete = is_complete and num_read < NUM_CHECKED_ROWS
    return FirstRows(rows=tuple(rows), preferences=tuple(preferences), is_complete=is_complete)


def _route_problems(
    routes: frozenset[str],
    *,
    name: str,
    source: DataSource,
    teachers: Mapping[str, TeacherConfig],
) -> Iterator[str]:
    """Yield a message if training rows have a route that no teacher has."""
    known = {key if teacher.route is None else teacher.route for key, teacher in teachers.items()}
    if unknown := sorted(routes - known):
        yield (
            f"{name}.route_key is {source.route_key}, and rows have the route {unknown[0]!r}, "
            "which no teacher has: correct the rows, or set teachers.NAME.route to it. Routes are "
            f"{', '.join(sorted(known))}."
        )


def _tokenizer_problems(name: str, rows: Sequence[Row], *, config: TrainerConfig) -> Iterator[str]:
    """Yield what the run would refuse about a tokenizer that it trains on these and later rows.

    Both bounds hold for the tokenizer of all rows, too: more texts only add entries, and no token
    is longer than a text piece.
    """
    data = config.data
    if not trains_new_tokenizer(data.tokenizer, run=config.run):
        return
    from temper_trainer.data.trained_tokenizer import train_tokenizer  # 0.1 s

    # The run does not train it on held-out data, but splits these prompts at the same places.
    is_learned = name not in data.eval_sources
    texts = [text for row in rows for text in row.texts] if is_learned else ["a"]
    try:
        trained = train_tokenizer(data.tokenizer, texts)
    except TemperError as error:
        yield f"{name}: {error}"
        return
    size = config.actor.engine.model.architecture.get("vocab_size")
    num_entries = trained.get_vocab_size()
    if is_learned and isinstance(size, int) and size < num_entries:
        yield (
            f"actor.engine.model.architecture.vocab_size is {size}, but the tokenizer that is "
            f"trained on {name} has at least {num_entries} entries: raise it or leave it out."
        )
    if data.overlong_prompts == "drop" or data.string_prompts != "text":
        return
    if config.preference_kind is not None:  # other limits apply to pairs
        return
    for row in rows:
        if not isinstance(row.prompt, str):
            continue
        text = data.prompt_template.replace("{prompt}", row.prompt)
        num_pieces = len(trained.pre_tokenizer.pre_tokenize_str(text))
        if num_pieces > data.max_prompt_tokens:
            yield (
                f"{name}: {row.location}: the prompt has at least {num_pieces} tokens, but "
                f"data.max_prompt_tokens is {data.max_prompt_tokens}: raise it, or set "
                "data.overlong_prompts to drop."
            )
            return  # one is enough
