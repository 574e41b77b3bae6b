"""Where old prompts and demonstrations come from: files, columns, lengths, what happens to long prompts."""

from collections.abc import Sequence

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.reward_functions import reads_messages
from temper_legacy_shim.configs.mapping.rl_facts import evaluation_key
from temper_legacy_shim.configs.reading.config_values import Plain, from_home, parse_value


def paths_of(draft: Draft, key: str) -> list[str]:
    """Files of an old key: a list, one path, or a list that was written as text."""
    value = draft.old.get(key)
    if isinstance(value, str) and value.strip().startswith("["):
        value = parse_value(value.strip())[0]
    if value in (None, ""):
        return []
    items: Sequence[Plain] = value if isinstance(value, list) else [value]
    return [from_home(str(item)) for item in items if item not in (None, "")]


def put_source(draft: Draft, *, new: str, old: str) -> bool:
    """One source of files; whether there is one."""
    paths = paths_of(draft, old)
    if not paths:
        return False
    kinds = {"jsonl" if path.endswith((".jsonl", ".json")) else "parquet" for path in paths}
    if len(kinds) > 1:
        draft.find("person", "data-files", f"{old} mixes parquet and JSON files: a source here has one kind. Convert some.", old)
    if any(path.endswith(".json") for path in paths):
        draft.find("hazard", "data-files", f"{old} names .json files: here a file holds one JSON object a line (jsonl).", old)
    single = not isinstance(draft.old.get(old), list)
    draft.put(f"{new}.paths", list(paths), rule="data-files", old=[old], verbatim=not single and paths == draft.old.get(old))
    draft.put(f"{new}.kind", sorted(kinds)[-1] if len(kinds) == 1 else "parquet", rule="data-kind", old=[old])
    return True


def build_rl_data(draft: Draft) -> None:
    """Training and held-out prompts of a PPO-like run."""
    if not put_source(draft, new="data.train", old="data.train_files"):
        draft.find("person", "data-files", "data.train_files is not set: say where the prompts are.", "data.train_files")
    sources = ["data.train"]
    if evaluates(draft) and put_source(draft, new="data.eval", old="data.val_files"):
        sources.append("data.eval")
    else:
        draft.say("data.val_files", "trainer.test_freq and trainer.val_before_train turn evaluation off, so the files are never read")
    for source in sources:
        draft.put(
            f"{source}.prompt_key", draft.text("data.prompt_key") or "prompt", rule="prompt-key", old=["data.prompt_key"], verbatim=True
        )
        draft.put(f"{source}.answer_key", "reward_model.ground_truth", rule="answer-key", old=["data.reward_model_key"])
        source_key = draft.text("data.reward_fn_key") or "data_source"
        messages = [draft.text("data.prompt_key") or "prompt"] * reads_messages(draft)
        draft.put(f"{source}.extra_keys", [source_key, "extra_info", *messages], rule="reward-columns", old=["data.reward_fn_key"])
    _rows(draft)
    draft.copy("data.max_prompt_tokens", "data.max_prompt_length", rule="prompt-length", expected="number")
    _overlong(draft)
    draft.put(
        "data.shuffle",
        draft.switch("data.shuffle") or not draft.old.has("data.shuffle"),
        rule="shuffle",
        old=["data.shuffle"],
        verbatim=True,
    )
    seed = draft.integer("data.seed")
    if seed is not None:
        draft.put("run.seed", seed, rule="seed", old=["data.seed"], verbatim=True)
    _custom(draft)


def evaluates(draft: Draft) -> bool:
    """Whether the old trainer ever looked at its held-out prompts."""
    before = draft.switch("trainer.val_before_train") or not draft.old.has("trainer.val_before_train")
    return before or draft.frequency(evaluation_key(draft)) > 0


def _rows(draft: Draft) -> None:
    for old, new in (("data.train_max_samples", "data.train.max_rows"), ("data.val_max_samples", "data.eval.max_rows")):
        count = draft.integer(old)
        if count is not None and count > 0:
            draft.put(new, count, rule="max-rows", old=[old], verbatim=True)


def _overlong(draft: Draft) -> None:
    key, filters = "data.truncation", "data.filter_overlong_prompts"
    cut = draft.text(key) or "error"
    if draft.switch(filters):
        draft.put("data.overlong_prompts", "drop", rule="overlong-prompts", old=[filters])
        draft.say(key, "longer prompts are dropped before they could be cut")
        return
    if cut == "error":
        draft.put("data.overlong_prompts", "error", rule="overlong-prompts", old=[key])
        return
    draft.put("data.overlong_prompts", "drop", rule="overlong-prompts", old=[key])
    draft.find(
        "hazard",
        "overlong-prompts",
        f"{key} is {cut}: prompts beyond data.max_prompt_length were cut at the {cut}; prompts are never cut here, they are dropped and "
        "counted. Raise data.max_prompt_tokens to keep them whole.",
        key,
    )


def _custom(draft: Draft) -> None:
    path = draft.text("data.custom_cls.path")
    if path and path.lower() not in ("null", "none"):
        name = draft.text("data.custom_cls.name")
        draft.find(
            "person",
            "custom-dataset",
            f"data.custom_cls takes the class {name} of {path} for its data set: there are no data set classes here. Write its rows to a "
            "jsonl or parquet file with a prompt and an answer, and name that in data.train.paths.",
            "data.custom_cls.path",
        )
    for key in ("data.sampler.class_path", "data.datagen.path"):
        if draft.text(key):
            draft.find(
                "person",
                "custom-sampler",
                f"{key} is {draft.text(key)}: code of yours chose the data; here the order is data.shuffle.",
                key,
            )
