"""The reference of the configuration: every key with its type, default, unit and meaning, from the dataclasses that own the defaults."""

from __future__ import annotations

from collections.abc import Iterator

from temper_engine_api.registry import engine_config_class
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.run import TrainerConfig
from temper_trainer.config_loading.help_text import meanings_of
from temper_trainer.config_loading.schema import ANY_NAME, Entry, entries_of
from temper_trainer.config_loading.structuring import describe_type
from temper_trainer.config_loading.yaml_text import scalar_text

UNITS = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_steps": "steps",
    "_rows": "rows",
    "_workers": "processes",
    "_size": "",
}
"""By the end of a key's name: units end the name."""

HEAD = """\
# Configuration

Every key of `temper-train`, as its dataclass declares it: this page is generated. `{name}` stands for a name that you choose. A block
that appears in several places is listed where it appears first. What `temper-train --help` prints is the same list.
"""


def configuration_page() -> str:
    """The page, in Markdown; the blocks of both engines stand at its end."""
    parts = [HEAD.replace("{name}", ANY_NAME), *_block("", TrainerConfig, engine_class=EngineConfig, seen={})]
    for name in ("fsdp", "megatron"):
        cls = engine_config_class(name)
        known = {entry.name for entry in entries_of(EngineConfig, engine_class=EngineConfig)}
        own = [entry for entry in entries_of(cls, engine_class=cls) if entry.name not in known]
        parts += [f"\n## With `model_engine={name}`, under every `engine` block\n", *_table("", own, meanings_of(cls))]
    return "\n".join(parts) + "\n"


def _block(prefix: str, cls: type, *, engine_class: type[EngineConfig], seen: dict[type, str]) -> Iterator[str]:
    """One heading and table for a block, then its blocks."""
    entries = list(entries_of(cls, engine_class=engine_class))
    meanings = meanings_of(cls)
    leaves = [entry for entry in entries if entry.block is None and entry.item is None]
    if leaves:
        yield f"\n## `{prefix}*`\n" if prefix else "\n## At the top\n"
        yield from _table(prefix, leaves, meanings)
    for entry in entries:
        below = entry.block or entry.item
        if below is None:
            continue
        inner = f"{prefix}{entry.name}." + (f"{ANY_NAME}." if entry.item is not None else "")
        if below in seen:
            yield f"\n## `{inner}*`\n\n{meanings.get(entry.name, '')} The same keys as `{seen[below]}*`."
            continue
        seen[below] = inner
        yield from _block(inner, below, engine_class=engine_class, seen=seen)


def _table(prefix: str, entries: list[Entry], meanings: dict[str, str]) -> Iterator[str]:
    yield "| key | type | default | unit | meaning |\n|---|---|---|---|---|"
    for entry in entries:
        default = f"`{scalar_text(entry.default)}`" if entry.has_default else "must be set"
        unit = next((unit for end, unit in UNITS.items() if entry.name.endswith(end)), "")
        cells = [f"`{prefix}{entry.name}`", describe_type(entry.annotation), default, unit, meanings.get(entry.name, "")]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
