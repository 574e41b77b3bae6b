"""Old prompts and demonstrations: files, columns, lengths, and long prompts."""

from collections.abc import Sequence

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.reward_functions import reads_messages
from temper_legacy_shim.configs.mapping.rl.rl_facts import evaluation_key
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact
from temper_legacy_shim.configs.reading.config_values import Plain, from_home, parse_value


def paths_of(draft: Draft, key: str) -> list[str]:
    """Return the files of an old key: a list, a path, or a list in a string."""
    value = draft.old.get(key)
    if isinstance(value, str) and value.strip().startswith("["):
        value = parse_value(value.strip())[0]
    if value in (None, ""):
        return []
    items: Sequence[Plain] = value if isinstance(value, list) else [value]
    return [from_home(str(item)) for item in items if item not in (None, "")]


def put_source(draft: Draft, *, new: str, old: str) -> bool:
    """Set a data source; return False if there is none."""
    paths = paths_of(draft, old)
    if not paths:
        return False
    kinds = {"jsonl" if path.endswith((".jsonl", ".json")) else "parquet" for path in paths}
    if len(kinds) > 1:
        draft.find("data-files.mixed", old)
    if any(path.endswith(".json") for path in paths):
        draft.find("data-files.json", old)
    single = not isinstance(draft.old.get(old), list)
    draft.put(
        f"{new}.paths",
        list(paths),
        rule="data-files",
        old=[old],
        verbatim=not single and paths == draft.old.get(old),
    )
    draft.put(
        f"{new}.name",
        sorted(kinds)[-1] if len(kinds) == 1 else "parquet",
        rule="data-kind",
        old=[old],
    )
    return True


def sources(draft: Draft) -> list[str]:
    return ["data.train", *["data.eval"] * has_eval_data(draft)]


@fact
def has_eval_data(draft: Draft) -> bool:
    return "data.eval.paths" in draft.settings


def build_rl_data(draft: Draft) -> None:
    """Set training and held-out prompts of a PPO-like run."""
    if not put_source(draft, new="data.train", old="data.train_files"):
        draft.find("data-files.no-prompts", "data.train_files")
    if evaluates(draft):
        put_source(draft, new="data.eval", old="data.val_files")
    for source in sources(draft):
        apply_rows(draft, "data-source", source=source)
    apply_rows(draft, "prompts")


@fact
def reward_columns(draft: Draft) -> list[Plain]:
    """Return the columns that the reward function gets, next to the answer."""
    messages = [draft.text("data.prompt_key") or "prompt"] * reads_messages(draft)
    return [draft.text("data.reward_fn_key") or "data_source", "extra_info", *messages]


@fact
def evaluates(draft: Draft) -> bool:
    """Check if the old trainer evaluated held-out prompts."""
    # fit() reads it with a default of True, also in releases whose trees lack it.
    before = draft.switch("trainer.val_before_train") or not draft.old.has(
        "trainer.val_before_train"
    )
    return before or draft.frequency(evaluation_key(draft)) > 0
