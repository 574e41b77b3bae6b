"""Effective values of supervised fine-tuning and generation, before and after.

See ``test_meaning``.

The rules are from verl's own trainers at the tags: ``trainer/fsdp_sft_trainer.py``,
``trainer/sft_trainer.py``, ``trainer/main_generation.py`` and
``trainer/main_generation_server.py``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

pytest.importorskip(
    "hydra", reason="needs Hydra, which temper-trainer brings, to compose the old side with"
)


from temper_legacy_shim.configs import translate

from .test_meaning import Old, is_on_megatron, number, read_both, release, tree_of

ENTRIES = (
    "verl.trainer.fsdp_sft_trainer",
    "verl.trainer.sft_trainer",
    "verl.trainer.main_generation",
    "verl.trainer.main_generation_server",
)
Row = Mapping[str, object]


def length_of(old: Old) -> dict[str, object]:
    """Return epochs, or steps where they were given; whichever came first ended the old run."""
    steps = old("trainer.total_training_steps")
    return (
        {"run.total_epochs": old("trainer.total_epochs")}
        if steps is None
        else {"run.total_steps": steps}
    )


def expect_of_both(old: Old) -> dict[str, object]:
    """Return what both generations of fine-tuning share: one update for each batch."""
    rank = int(number(old("model.lora_rank") or 0))
    return {
        "task": "sft",
        "batching.prompts_per_step": old("data.train_batch_size"),
        "batching.num_mini_batches": 1,
        "batching.num_passes": 1,
        "data.max_prompt_tokens": old("data.max_length"),
        "actor.engine.optimizer.lr": old("optim.lr"),
        "actor.engine.optimizer.betas": old("optim.betas"),
        "actor.engine.optimizer.weight_decay": old("optim.weight_decay"),
        "actor.engine.optimizer.clip_grad_norm": old("optim.clip_grad"),
        "actor.engine.schedule.advance": "update",
        "run.seed": old("trainer.seed"),
        **(
            {"actor.engine.lora.rank": rank, "actor.engine.lora.alpha": old("model.lora_alpha")}
            if rank
            else {}
        ),
        **length_of(old),
        **evaluation_of(old),
    }


def evaluation_of(old: Old) -> dict[str, object]:
    """Return held-out files and steps between evaluations; 0 is only before and after."""
    steps = old("trainer.test_freq")
    return {
        "data.eval.paths": listed(old("data.val_files")) if old("data.val_files") else None,
        "run.eval_every": max(0, int(steps))
        if old("data.val_files") and isinstance(steps, int)
        else 0,
    }


def expect_of_columns(old: Old, row: Row) -> dict[str, object]:
    """Return what the first generation did.

    Before v0.4.0 it had one schedule, cosine, and no key for it.
    """
    ratio = (
        old("optim.lr_warmup_steps_ratio")
        if old("optim.lr_warmup_steps_ratio") is not None
        else old("optim.warmup_steps_ratio")
    )
    result = expect_of_both(old)
    result["actor.engine.schedule.kind"] = old("optim.lr_scheduler") or "cosine"
    result["actor.engine.schedule.warmup_ratio"] = ratio
    result["actor.engine.schedule.min_lr_ratio"] = 0.0
    if release(row) >= (0, 5):
        result["run.max_ckpt_to_keep"] = old("trainer.max_ckpt_to_keep")
    if release(row) >= (0, 4):
        result["run.save_every"] = max(0, int(number(old("trainer.save_freq"))))
    if old("data.multiturn.enable"):
        return result | {"data.train.messages_key": old("data.multiturn.messages_key")}
    for new, column, fields in (
        ("prompt", "prompt_key", "prompt_dict_keys"),
        ("answer", "response_key", "response_dict_keys"),
    ):
        inner = old(f"data.{fields}")
        path = ".".join([str(old(f"data.{column}")), *(inner if isinstance(inner, list) else [])])
        result |= dict.fromkeys((f"data.{each}.{new}_key" for each in ("train", "eval")), path)
    return result


def expect_of_engines(old: Old, row: Row) -> dict[str, object]:
    """Return what the second generation did, on either engine."""
    result = expect_of_both(old)
    steps = old("optim.lr_warmup_steps")
    has_steps = steps is not None and number(steps) > 0
    style = (
        old("optim.lr_decay_style")
        if is_on_megatron(row)
        else old("optim.warmup_style") or old("optim.lr_scheduler_type")
    )
    result["actor.engine.schedule.kind"] = style
    result["actor.engine.schedule.warmup_steps"] = steps if has_steps else 0
    result["actor.engine.schedule.warmup_ratio"] = (
        0.0 if has_steps else old("optim.lr_warmup_steps_ratio")
    )
    if style == "cosine" and not is_on_megatron(row):
        result["actor.engine.schedule.min_lr_ratio"] = old("optim.min_lr_ratio")
    if is_on_megatron(row) and (rank := int(number(old("model.lora.rank") or 0))):
        result |= {
            "actor.engine.lora.rank": rank,
            "actor.engine.lora.alpha": old("model.lora.alpha"),
        }
    result["data.train.messages_key"] = old("data.messages_key")
    result["run.max_ckpt_to_keep"] = old("trainer.max_ckpt_to_keep")
    save = old("trainer.save_freq")
    if not isinstance(save, str):  # after_each_epoch
        result["run.save_every"] = max(0, int(number(save)))
    return result


def expect_of_generation(old: Old, row: Row) -> dict[str, object]:
    """Return what the program without servers drew."""
    samples = old("rollout.do_sample") is not False
    return {
        "task": "generate",
        "generate.num_completions": old("data.n_samples"),
        "sampling.temperature": old("rollout.temperature") if samples else 0.0,
        "sampling.top_p": old("rollout.top_p") if samples else None,
        "sampling.top_k": max(0, int(number(old("rollout.top_k")))) if samples else None,
        "sampling.max_tokens": old("rollout.response_length"),
        "data.max_prompt_tokens": old("rollout.prompt_length"),
        "data.train.paths": listed(old("data.path")),
        "data.train.prompt_key": old("data.prompt_key"),
        "actor.engine.model.path": old("model.path"),
    }


def expect_of_servers(old: Old, row: Row) -> dict[str, object]:
    """Return what the program with servers drew.

    It was composed on the tree of main_ppo, and ignored top_k.
    """
    rollout = "actor_rollout_ref.rollout"
    return {
        "task": "generate",
        "generate.num_completions": old(f"{rollout}.n"),
        "sampling.temperature": old(f"{rollout}.temperature"),
        "sampling.top_p": old(f"{rollout}.top_p"),
        "sampling.top_k": 0,
        "sampling.max_tokens": old(f"{rollout}.response_length"),
        "data.train.paths": listed(old("data.train_files")),
        "data.train.prompt_key": old("data.prompt_key"),
        "actor.engine.model.path": old("actor_rollout_ref.model.path"),
    }


EXPECTATIONS: dict[str, Callable[[Old, Row], dict[str, object]]] = dict(
    zip(
        ENTRIES,
        (expect_of_columns, expect_of_engines, expect_of_generation, expect_of_servers),
        strict=True,
    )
)


def listed(value: object) -> list[str]:
    """Return paths as the new file has them."""
    paths = value if isinstance(value, list) else [value]
    return [
        str(path).replace("~/", "${oc.env:HOME}/", 1) if str(path).startswith("~/") else str(path)
        for path in paths
    ]


def wrong_of(facts: Path, row: Row) -> dict[str, tuple[object, object]] | None:
    """Return keys with the expected and the new value where they differ.

    None where a person has to decide first.
    """
    values_of_row = read_both(facts, row)
    if values_of_row is None:
        return None
    old, new = values_of_row
    expected = EXPECTATIONS[str(row["entry"])](old, row)
    return {
        key: (value, new.get(key))
        for key, value in expected.items()
        if value is not None and new.get(key) != value
    }


def test_column_data_of_the_first_release_fell_by_a_cosine() -> None:
    translation = translate(
        ["data.train_files=/d.parquet"],
        entry="verl.trainer.fsdp_sft_trainer",
        version="v0.3.0.post1",
    )
    assert [
        setting.value
        for setting in translation.settings
        if setting.key == "actor.engine.schedule.kind"
    ] == ["cosine"]


FIRST, SECOND = ENTRIES[:2]


@pytest.mark.parametrize(("entry", "version"), [(FIRST, "v0.6.1"), (SECOND, "v0.9.0")])
def test_fine_tuning_measures_its_held_out_loss_as_often(entry: str, version: str) -> None:
    files = ["data.train_files=/t.parquet", "data.val_files=/v.parquet", "data.val_max_samples=64"]
    more = ["trainer.test_freq=50", "data.prompt_key=q", "data.response_key=a"]
    run = translate([*files, *more[: 3 if entry == FIRST else 1]], entry=entry, version=version)
    values = {setting.key: setting.value for setting in run.settings}
    assert (values["data.eval.paths"], values["run.eval_every"]) == (["/v.parquet"], 50)
    assert values["data.eval.max_rows"] == 64
    columns = ("prompt_key", "answer_key") if entry == FIRST else ("messages_key",)
    assert all(values[f"data.eval.{key}"] == values[f"data.train.{key}"] for key in columns)
    without = translate([files[0], "data.val_files=null"], entry=entry, version=version)
    assert not [setting for setting in without.settings if "eval" in setting.key]


@pytest.mark.parametrize(
    ("entry", "version", "kept"),
    [(FIRST, "v0.4.1", None), (FIRST, "v0.5.0", 3), (FIRST, "v0.7.0", 3), (SECOND, "v0.9.1", 3)],
)
def test_fine_tuning_keeps_as_many_checkpoints(entry: str, version: str, kept: int | None) -> None:
    # fsdp_sft_trainer.py and sft_trainer.py read trainer.max_ckpt_to_keep since v0.5.0.
    given = ["data.train_files=/t.parquet", "++trainer.max_ckpt_to_keep=3"]
    run = translate(given, entry=entry, version=version)
    assert {s.key: s.value for s in run.settings}["run.max_ckpt_to_keep"] == kept
    assert run.tokens[1].disposition == ("dropped" if kept is None else "moved")


@pytest.mark.parametrize("value", ["False", "True"])
def test_thinking_argument_of_the_chat_template_is_a_question(value: str) -> None:
    # multiturn_sft_dataset.py passes data.enable_thinking_default on where rows have no own value.
    overrides = ["data.train_files=/t.parquet", f"data.enable_thinking_default={value}"]
    run = translate(overrides, entry=SECOND, version="v0.9.1")
    (question,) = [each for each in run.findings if each.level == "person"]
    assert f"data.enable_thinking_default gave the chat template enable_thinking={value}" in (
        question.message
    )
    assert run.tokens[1].disposition == "needs a person"


@pytest.mark.parametrize(
    ("version", "given", "level"),
    [
        ("v0.7.0", (), None),  # the key exists since v0.7.1
        ("v0.7.1", (), "hazard"),
        ("v0.9.1", (), "hazard"),
        ("v0.9.1", ("data.enable_thinking_default=none",), "person"),
        ("v0.9.1", ("data.enable_thinking_default=null",), None),
    ],
)
def test_default_none_of_the_thinking_argument_is_a_text_and_counts_as_true(
    version: str, given: tuple[str, ...], level: str | None
) -> None:
    # YAML's null is not none: multiturn_sft_dataset.py takes bool("none").
    run = translate(["data.train_files=/t.parquet", *given], entry=SECOND, version=version)
    findings = [each for each in run.findings if each.rule == "chat-template-kwargs"]
    assert [each.level for each in findings] == ([level] if level else [])
    assert all("enable_thinking=True" in each.message for each in findings)


def test_schedule_of_fine_tuning_is_as_long_as_the_run() -> None:
    # sft_trainer.py replaces optim.total_training_steps by the trainer's own number.
    overrides = ["optim.lr_scheduler_type=cosine", "optim.total_training_steps=1000"]
    files = "data.train_files=/t.parquet"
    run = translate([files, *overrides], entry=SECOND, version="v0.9.1")
    values = {setting.key: setting.value for setting in run.settings}
    assert values["actor.engine.schedule.total_steps"] == 0
    assert run.tokens[2].disposition == "dropped"


@pytest.mark.parametrize("version", ["v0.6.1", "v0.7.0"])
def test_first_fine_tuning_read_no_steps_of_warmup_and_no_floor(version: str) -> None:
    # fsdp_sft_trainer.py gives its schedule lr_warmup_steps_ratio alone; the keys are those of the
    # dataclass that v0.6.1 brought.
    unread = ["optim.lr_warmup_steps=5", "optim.min_lr_ratio=0.1"]
    run = translate(["data.train_files=/t.parquet", *unread], entry=FIRST, version=version)
    values = {setting.key: setting.value for setting in run.settings}
    assert values["actor.engine.schedule.warmup_ratio"] == 0.1
    assert not {f"actor.engine.schedule.{key}" for key in ("warmup_steps", "min_lr_ratio")} & {
        *values
    }
    assert [token.disposition for token in run.tokens[-2:]] == ["dropped"] * 2
    assert all(f"{version} did not read it" in token.reason for token in run.tokens[-2:])


def test_first_fine_tuning_had_a_schedule_of_all_epochs() -> None:
    # fsdp_sft_trainer.py takes steps_per_epoch * total_epochs, also if the run ends before.
    overrides = ["data.train_files=/t.parquet", "trainer.total_epochs=4"]
    run = translate([*overrides, "trainer.total_training_steps=500"], entry=FIRST, version="v0.6.1")
    (hazard,) = [each.message for each in run.findings if each.rule == "sft-schedule-length"]
    assert "as long as 4 epochs" in hazard
    assert "sft-schedule-length" not in {
        each.rule for each in translate(overrides, entry=FIRST, version="v0.6.1").findings
    }


@pytest.mark.parametrize(
    ("entry", "version", "frequency"),
    [(FIRST, "v0.3.0.post1", ()), (SECOND, "v0.9.0", ("trainer.test_freq=after_each_epoch",))],
)
def test_evaluation_after_each_epoch_is_reported(
    entry: str, version: str, frequency: tuple[str, ...]
) -> None:
    files = ("data.train_files=/t.parquet", "data.val_files=/v.parquet")
    for epochs, is_reported in ((3, True), (1, False)):
        given = [*files, *frequency, f"trainer.total_epochs={epochs}"]
        run = translate(given, entry=entry, version=version)
        rules = {finding.rule for finding in run.findings if finding.level == "hazard"}
        assert ("sft-val" in rules) is is_reported


def test_program_with_servers_completes_the_prompts_of_its_training_files() -> None:
    overrides = [
        "data.train_files=/d.parquet",
        "actor_rollout_ref.rollout.n=32",
        "actor_rollout_ref.rollout.top_k=50",
        "+data.output_path=/o.parquet",
    ]
    translation = translate(
        overrides, entry="verl.trainer.main_generation_server", version="v0.7.0"
    )
    values = {setting.key: setting.value for setting in translation.settings}
    assert (values["generate.num_completions"], values["data.train.paths"]) == (32, ["/d.parquet"])
    assert "sampling.top_k" not in values
    (note,) = [each.message for each in translation.findings if each.rule == "gen-output"]
    assert f"in {values['run.dir']}/{values['generate.file']}" in note
    assert not [finding for finding in translation.findings if finding.level == "refused"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_run_of_fine_tuning_and_generation_means_the_same(
    entry: str, facts: Path, invocations: list[dict[str, object]]
) -> None:
    of_entry = [
        row for row in invocations if row["entry"] == entry and "__ENV" not in str(row["overrides"])
    ]
    # The entry of a script that stayed behind in a later release has no tree there.
    rows = [
        row
        for row in of_entry
        if (facts / "defaults" / str(row["tag"]) / f"{tree_of(row)}.json").is_file()
    ]
    results = {
        f"{row['tag']} {row['path']} {number}": wrong_of(facts, row)
        for number, row in enumerate(rows)
    }
    compared = {name: result for name, result in results.items() if result is not None}
    assert {name: result for name, result in compared.items() if result} == {}
    assert len(compared) >= {ENTRIES[0]: 30, ENTRIES[1]: 10, ENTRIES[2]: 15, ENTRIES[3]: 3}[entry]
