"""Generate the configuration reference: type, default, unit and meaning of every key.

All but the units is read from the dataclasses that declare the settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from temper_engine_api.registry import load_engine_config_class
from temper_engine_api.specs import EngineConfig
from temper_trainer import algorithms
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.help_text import read_field_docstrings
from temper_trainer.config_loading.resolved_config import format_value
from temper_trainer.config_loading.schema import (
    ANY_NAME,
    Entry,
    iterate_entries,
    list_classes,
    split_settings,
)
from temper_trainer.config_loading.structuring import describe_type
from temper_trainer.settings.variants import Custom

UNITS = {
    "_bytes": "bytes",
    "_completions": "completions",
    "_every": "steps",
    "_mib": "MiB",
    "_parallel": "ranks",
    "_prefetch": "layers",
    "_rows": "rows",
    "_s": "seconds",
    "_steps": "steps",
    "_tokens": "tokens",
    "_turns": "turns",
    "_updates": "updates",
    "_workers": "processes",
    "batch_size": "demonstrations",
    "cpus_per_worker": "CPUs",
    "fsdp_size": "ranks",
    "gpus_per_worker": "GPUs",
    "group_size": "completions",
    "horizon": "tokens",
    "canary_tolerance": "nats",
    "kl_clamp": "nats",
    "layers_per_stage": "layers",
    "loss_scale_growth_interval": "updates",
    "max_ckpt_to_keep": "checkpoints",
    "max_concurrency": "requests",
    "max_concurrent": "sequences",
    "max_consecutive_skips": "updates",
    "max_kl": "nats",
    "max_model_len": "tokens",
    "max_open": "environments",
    "max_operations": "operations",
    "max_restarts": "restarts",
    "max_retries": "retries",
    "usd_per_million_completion_tokens": "US dollars",
    "usd_per_million_prompt_tokens": "US dollars",
    "max_rounds": "rounds",
    "max_staleness": "updates",
    "num_completions": "completions",
    "num_mini_batches": "mini-batches",
    "num_passes": "passes",
    "num_replicas": "replicas",
    "num_table_rows": "completions",
    "num_threads": "threads",
    "profile_from": "updates",
    "prompts_per_round": "prompts",
    "prompts_per_step": "prompts",
    "streaming_buffer": "rows",
    "target": "nats",
    "tensor_parallel_size": "processes",
    "tokens_per_update": "tokens",
    "top_k": "tokens",
    "total_epochs": "passes",
    "virtual_pipeline": "chunks",
    "vocab_size": "tokens",
    "wrap_together": "modules",
}
"""Units by key, or by the suffix of a key; the longest match applies."""

NO_UNIT = frozenset(
    {
        "alpha",
        "betas",
        "center_coef",
        "clamp",
        "clip_grad_norm",
        "coef",
        "coef_max",
        "coef_step",
        "decay",
        "dropout",
        "entropy_coef",
        "eps",
        "eval_solved_reward",
        "gpu_memory_utilization",
        "high",
        "initial_loss_scale",
        "kl_loss_coef",
        "kl_reward_coef",
        "label_smoothing",
        "low",
        "lr",
        "max_changed_fraction",
        "max_failure_fraction",
        "max_score",
        "min_lr_ratio",
        "min_score",
        "off_policy_fraction",
        "penalty",
        "prometheus_port",
        "rank",
        "reshard_after_forward",
        "router_aux_loss",
        "router_z_loss",
        "scale",
        "seed",
        "shuffled_fraction",
        "sleep_level",
        "temperature",
        "top_p",
        "truncate_at",
        "turn_discount",
        "warmup_ratio",
        "weight",
        "weight_decay",
        "wrong_first_operation",
    }
)
"""Numbers without a unit, such as fractions, factors and seeds, except those of algorithms."""

HEAD = """\
# Configuration

Every key of `temper-train`, generated from the dataclasses that declare them. Each block has a
page. `{name}` stands for a name that you choose. `temper-train --help BLOCK` prints the same list.

| block | contents |
|---|---|
"""


def build_configuration_pages() -> dict[str, str]:
    """Return the pages in Markdown by file name: an index, a page per block and per engine."""
    entries = list(iterate_entries(TrainerConfig, engine_class=EngineConfig))
    meanings = read_field_docstrings(TrainerConfig)
    blocks = [entry for entry in entries if entry.block or entry.item or entry.choice]
    leaves = [entry for entry in entries if entry not in blocks]
    seen: dict[type, str] = {}
    pages = {f"{entry.name}.md": _build_block_page(entry, meanings, seen) for entry in blocks}
    for name in ("fsdp", "megatron"):
        pages[f"engine-{name}.md"] = _build_engine_page(name)
    rows = [
        f"| [{entry.name}]({entry.name}.md) | {_describe_block(entry, meanings)} |"
        for entry in blocks
    ]
    rows += [
        f"| [engine, with model_engine={name}](engine-{name}.md) | keys of every `engine` block |"
        for name in ("fsdp", "megatron")
    ]
    top = ["\n## Keys outside of blocks\n", *_iterate_table_lines("", leaves, meanings)]
    index = HEAD.replace("{name}", ANY_NAME) + "\n".join([*rows, *top]) + "\n"
    return {"index.md": index} | pages


def _build_block_page(entry: Entry, meanings: Mapping[str, str], seen: dict[type, str]) -> str:
    """Return the page of a top-level block; `seen` maps documented classes to their prefixes."""
    head = f"# {entry.name}\n\n{_describe_block(entry, meanings)}\n"
    if entry.choice is not None:
        # The title of the page already has the meaning.
        return "\n".join([head, *_iterate_variant_lines(entry.name, entry, seen=seen)]) + "\n"
    prefix, nested = _find_nested("", entry)
    assert nested is not None
    if nested in seen:
        return f"{head}\nThe same keys as {_link_block(seen[nested])}.\n"
    seen[nested] = prefix
    lines = _iterate_block_lines(prefix, nested, engine_class=EngineConfig, seen=seen)
    return "\n".join([head, *lines]) + "\n"


def _describe_block(entry: Entry, meanings: Mapping[str, str]) -> str:
    """Return the docstring of a block's field, or the first line of its class's if it has none."""
    meaning = meanings.get(entry.name, "")
    if meaning and not meaning.startswith("See "):
        return meaning
    return (inspect.getdoc(_find_nested("", entry)[1]) or "").partition("\n")[0]


def _find_nested(prefix: str, entry: Entry) -> tuple[str, type | None]:
    """Return prefix and class of the settings below a field; for a mapping, those of its values."""
    if entry.item is not None:
        return f"{prefix}{entry.name}.{ANY_NAME}.", entry.item.block
    return f"{prefix}{entry.name}.", entry.block


def _build_engine_page(name: str) -> str:
    cls = load_engine_config_class(name)
    known = {entry.name for entry in iterate_entries(EngineConfig, engine_class=EngineConfig)}
    extra_entries = [
        entry for entry in iterate_entries(cls, engine_class=cls) if entry.name not in known
    ]
    return "\n".join(
        [
            f"# engine: {name}",
            "",
            f"Keys of every `engine` block with `model_engine={name}`, in addition to those of all",
            "engines in [`actor.engine.*`](actor.md#actorengine).",
            "",
            *_iterate_table_lines("", extra_entries, read_field_docstrings(cls)),
            "",
        ]
    )


def _link_block(prefix: str) -> str:
    """Return a Markdown link to a block by its prefix, such as `actor.engine.`."""
    block = prefix.removesuffix(".")
    page, _, rest = block.partition(".")
    return f"[`{prefix}*`]({page}.md{_to_anchor(block) if rest else ''})"


def _to_anchor(block: str) -> str:
    """Return the anchor of a block's heading, as mkdocs makes it."""
    return "#" + "".join(letter for letter in block.lower() if letter.isalnum() or letter in "-_")


def _iterate_block_lines(
    prefix: str, cls: type, *, engine_class: type[EngineConfig], seen: dict[type, str]
) -> Iterator[str]:
    """Yield the heading and table of a block, then those of its nested blocks."""
    entries = list(iterate_entries(cls, engine_class=engine_class))
    meanings = read_field_docstrings(cls)
    leaves = [
        entry
        for entry in entries
        if entry.block is None and entry.item is None and entry.choice is None
    ]
    if leaves:
        # The title of the page already names a block at the top.
        yield f"\n## {prefix.removesuffix('.')}\n" if prefix.count(".") > 1 else ""
        yield from _iterate_table_lines(prefix, leaves, meanings)
    for entry in entries:
        inner, nested = _find_nested(prefix, entry)
        chosen = entry if entry.item is None else entry.item
        if chosen.choice is not None:
            key, meaning = inner.removesuffix("."), meanings.get(entry.name, "")
            yield f"\n## {key}\n\n{meaning}"
            yield from _iterate_variant_lines(key, chosen, seen=seen)
        if nested is None:
            continue
        if nested in seen:
            meaning = meanings.get(entry.name, "")
            block = inner.removesuffix(".")
            yield f"\n## {block}\n\n{meaning} The same keys as {_link_block(seen[nested])}."
            continue
        seen[nested] = inner
        yield from _iterate_block_lines(inner, nested, engine_class=engine_class, seen=seen)


def _iterate_variant_lines(key: str, entry: Entry, *, seen: dict[type, str]) -> Iterator[str]:
    """Yield the default of a tagged union, then the table of each variant and its blocks."""
    choice = entry.choice
    assert choice is not None
    is_off = entry.has_default and entry.default is None
    default = "null" if is_off else f"`{entry.default_variant}`"
    yield f"The default is {default}."
    if choice.union in seen:
        yield f"The same settings as {_link_block(seen[choice.union])}."
        return
    seen[choice.union] = f"{key}."
    blocks: dict[str, type | None] = {}
    for name, cls in list_classes(choice).items():
        yield f"\n### {key}: {name}\n\n{(inspect.getdoc(cls) or '').partition(chr(10))[0]}\n"
        own, shared = split_settings(choice, name=name, engine_class=EngineConfig)
        own = [setting for setting in own if cls is not Custom or setting.name != "name"]
        for other, settings in shared.items():
            yield f"As `{other}`: {', '.join(f'`{each}`' for each in settings)}\n"
        if own:
            yield from _iterate_table_lines(f"{key}.", own, read_field_docstrings(cls))
        blocks |= dict(_find_nested(f"{key}.", setting) for setting in own)
    for prefix, nested in blocks.items():
        if nested is not None and nested not in seen:
            seen[nested] = prefix
            yield from _iterate_block_lines(prefix, nested, engine_class=EngineConfig, seen=seen)


def _iterate_table_lines(
    prefix: str, entries: list[Entry], meanings: Mapping[str, str]
) -> Iterator[str]:
    # This class gives the column a minimum width (stylesheet.css).
    yield "| key | type | default | unit | meaning {: .meaning } |\n|---|---|---|---|---|"
    for entry in entries:
        default = f"`{format_value(entry.default)}`" if entry.has_default else "must be set"
        kind = describe_type(entry.annotation)
        cells = [
            f"`{prefix}{entry.name}`",
            kind,
            default,
            find_unit(entry) if "number" in kind else "",
            meanings.get(entry.name, ""),
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def find_unit(entry: Entry) -> str:
    """Return the unit of a number, or an empty string for an unknown key."""
    name = entry.name
    matching = [end for end in UNITS if name == end or (end.startswith("_") and name.endswith(end))]
    if matching:
        return UNITS[max(matching, key=len)]
    # Most numbers of a formula are factors and bounds, so a new algorithm needs no entry here.
    is_of_formula = entry.owner.__module__.startswith(f"{algorithms.__name__}.")
    return "none" if is_of_formula or name in NO_UNIT else ""
