"""The text of ``temper-train --help``: usage, groups with choices, and keys with defaults.

The descriptions are the docstrings of the dataclass fields, read from the source.
"""

import ast
import functools
import inspect
import itertools
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources

from temper_engine_api.errors import ConfigError, EngineNotFoundError
from temper_engine_api.registry import load_engine_config_class
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.composition import list_group_choices
from temper_trainer.config_loading.resolved_config import format_value
from temper_trainer.config_loading.schema import (
    ANY_NAME,
    Entry,
    collect_keys,
    is_optional,
    iterate_entries,
    list_classes,
    split_settings,
)
from temper_trainer.config_loading.structuring import describe_type
from temper_trainer.config_loading.unknown_keys import suggest_keys
from temper_trainer.settings.variants import Choice, Custom

USAGE = """\
temper-train: post-training of language models (SFT, PPO, GRPO, ...) on any Temper engine.

usage: temper-train [OVERRIDE ...] [--check] [--print] [--report RUN_DIR]
                    [--config-dir DIR] [--config-name NAME] [--help [GROUP ...]] [--version]

  OVERRIDE            KEY=VALUE, such as run.seed=1; GROUP=CHOICE, such as algorithm=ppo;
                      ~KEY resets a key to its default
  --check             validate the configuration and show sizes and placement, without training
  --print             print every value with its origin, without training
  --report RUN_DIR    recreate curves.png and report.html of a run, such as after a kill
  --config-dir DIR    a folder with your YAML files, which override built-in ones of the same name
  --config-name NAME  start with DIR/NAME.yaml, whose first line is `defaults: [temper, _self_]`
  --help GROUP        only this group or block of keys, such as algorithm or actor.engine
  --version           print the versions of the installed packages

examples:

  temper-train experiment=quickstart
  temper-train experiment=quickstart run.resume=auto
  temper-train experiment=gsm8k_grpo data.train.paths=[train.jsonl] --check
  temper-train --config-dir my_runs --config-name first run.seed=1

exit codes: 0 success; 1 the run failed; 2 the configuration is wrong or the run folder is in use;
130 stopped by SIGINT (Ctrl-C); 143 stopped by SIGTERM.
"""

GROUPS = ("experiment", "algorithm", "critic", "ref", "rollout", "model_engine")


def build_help_text(*, overrides: Sequence[str], config_dir: str | None) -> str:
    """Return the help text.

    Args:
        overrides: Words of the command line. A word without ``=`` is a group, block or key. If
            there are any, the text explains only these. ``model_engine=NAME`` selects the engine
            whose fields are listed under ``engine``.
        config_dir: The user's folder, whose choices are listed too.

    Raises:
        ConfigError: A word is neither a group nor a key.
    """
    engine_class = _engine_class(overrides)
    if names := [override for override in overrides if "=" not in override]:
        sections = (
            _build_section(name, engine_class=engine_class, config_dir=config_dir) for name in names
        )
        return "\n\n".join(sections) + "\n"
    groups = "\n".join(_group_lines(config_dir))
    keys = "\n".join(_KeyLines(engine_class=engine_class).list_block(TrainerConfig, prefix=""))
    return f"{USAGE}\ngroups (GROUP=CHOICE):\n\n{groups}\n\nkeys (key=default):\n\n{keys}\n"


def _build_section(name: str, *, engine_class: type[EngineConfig], config_dir: str | None) -> str:
    """Return help on a name: a config group's choices, a block's keys, or one key."""
    known = collect_keys(TrainerConfig, engine_class=engine_class)
    entry = known.get(name)
    if entry is None and name not in GROUPS:
        raise ConfigError(
            f"--help {name}: there is no such group or key: {suggest_keys(name, known=known)}"
        )
    parts = []
    if name in GROUPS:
        choices = "\n".join(
            _choice_lines(name, list_group_choices([name], config_dir=config_dir)[name])
        )
        parts.append(f"{name} (GROUP=CHOICE):\n\n{choices}")
    if entry is not None:
        listing = _KeyLines(engine_class=engine_class)
        lines = listing.list_entry(entry, prefix=name.removesuffix(entry.name))
        parts.append(f"{name} (key=default):\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _engine_class(overrides: Sequence[str]) -> type[EngineConfig]:
    """Return the chosen engine's configuration class; the base class if it is not installed."""
    names = [
        override.removeprefix("model_engine=")
        for override in overrides
        if override.startswith("model_engine=")
    ]
    try:
        return load_engine_config_class(names[-1] if names else "fsdp")
    except EngineNotFoundError:
        return EngineConfig


def _group_lines(config_dir: str | None) -> Iterator[str]:
    for group, choices in list_group_choices(GROUPS, config_dir=config_dir).items():
        yield f"  {group}"
        yield from _choice_lines(group, choices)


def _choice_lines(group: str, choices: Sequence[str]) -> Iterator[str]:
    for choice in choices:
        yield from _wrapped(f"{choice}: {_first_comment(group, choice)}")


def _first_comment(group: str, choice: str) -> str:
    """Return the comment at the top of a built-in group file.

    A user's own file is only marked as such.
    """
    file = resources.files("temper_trainer.conf") / group / f"{choice}.yaml"
    if not file.is_file():
        return "(in your --config-dir)"
    comments = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith("# @package"):
            comments.append(line.removeprefix("# "))
        elif not line.startswith("#"):
            break
    return " ".join(comments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyLines:
    """The lines of keys with their defaults and descriptions."""

    engine_class: type[EngineConfig]
    seen: dict[type, str] = field(default_factory=dict)
    """Blocks and unions whose keys are listed already, with the key of that listing. When one is
    used again, the help text refers to the first listing."""

    def list_block(self, cls: type, *, prefix: str) -> Iterator[str]:
        """Yield the fields of a class in order; a repeated block refers to its first listing."""
        for entry in iterate_entries(cls, engine_class=self.engine_class):
            yield from self.list_entry(entry, prefix=prefix)

    def list_entry(self, entry: Entry, *, prefix: str) -> Iterator[str]:
        """Yield the lines for a field and all keys below it."""
        key = f"{prefix}{entry.name}"
        description = read_field_docstrings(entry.owner).get(entry.field, "")
        if entry.item is not None:
            yield from self.list_entry(entry.item, prefix=f"{key}.")
            return
        if entry.choice is not None:
            yield from self._list_variants(entry, entry.choice, key=key, description=description)
            return
        if entry.block is None:
            yield f"  {key}{_default_text(entry)}   [{describe_type(entry.annotation)}]"
            yield from _wrapped(description)
            return
        if not description or description.startswith("See "):
            description = _class_description(entry.block)
        is_off = is_optional(entry.annotation) and entry.default is None
        note = "blocks by name" if entry.name == ANY_NAME else "off until set" if is_off else ""
        yield f"  {key}.*" + (f"   [{note}]" if note else "")
        # List the keys of a block only once: several roles have a block `engine` with dozens.
        if entry.block in self.seen:
            yield from _wrapped(f"{description} The same keys as {self.seen[entry.block]}.*")
            return
        self.seen[entry.block] = key
        yield from _wrapped(description)
        yield from self.list_block(entry.block, prefix=f"{key}.")

    def _list_variants(
        self, entry: Entry, choice: Choice, *, key: str, description: str
    ) -> Iterator[str]:
        """Yield the names in a tagged union, then the settings per variant."""
        is_set = entry.default is not None or not entry.has_default
        default = entry.default_variant if is_set else None
        yield f"  {key}={default or 'null'}   [{' | '.join(list_classes(choice))}]"
        if choice.union in self.seen:
            yield from _wrapped(f"{description} The same settings as {self.seen[choice.union]}.")
            return
        self.seen[choice.union] = key
        yield from _wrapped(f"{description} Each has settings of its own:")
        for name, cls in list_classes(choice).items():
            yield f"  {key} of {name}"
            yield from _wrapped(_class_description(cls))
            own, shared = split_settings(choice, name=name, engine_class=self.engine_class)
            for other, settings in shared.items():
                yield from _wrapped(f"As {other}: {', '.join(settings)}")
            for setting in own:
                if cls is not Custom or setting.name != "name":
                    # New for each setting: a block is listed for each variant that has it.
                    lines = _KeyLines(engine_class=self.engine_class)
                    yield from lines.list_entry(setting, prefix=f"{key}.")


def _class_description(cls: type) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0]


def _default_text(entry: Entry) -> str:
    if not entry.has_default:
        return " (must be set)"
    text = format_value(entry.default)
    if isinstance(entry.default, str) and text.startswith("'"):
        text = shlex.quote(f'"{entry.default}"')  # once for the shell, once for Hydra's grammar
    return f"={text}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, width=110, initial_indent="      ", subsequent_indent="      ")


def read_field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each dataclass field, including base class fields."""
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not object:
            docstrings |= _field_docstrings(base)
    return docstrings


@functools.cache  # the help text asks once per setting
def _field_docstrings(cls: type) -> dict[str, str]:
    body = _parse_classes(cls.__module__)[cls.__name__]
    docstrings = {}
    for node, following in itertools.pairwise(body):
        is_text = (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            docstrings[node.target.id] = (" ").join(ast.literal_eval(following.value).split())  # type: ignore[attr-defined]
    return docstrings


@functools.cache
def _parse_classes(module: str) -> dict[str, list[ast.stmt]]:
    # Python drops docstrings below fields, so they are read from the source.
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
