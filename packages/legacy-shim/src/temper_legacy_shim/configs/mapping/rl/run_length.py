"""Length, place and habits of a run."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    GENERATED,
    filters_groups,
    is_async,
    is_second_trainer,
    num_weight_syncs,
)
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact
from temper_legacy_shim.configs.reading.config_values import Plain, parse_value

_TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


def build_run(draft: Draft) -> None:
    """Set the blocks ``run`` and ``runtime``."""
    if is_async(draft):
        _async_length(draft)
    else:
        build_length(draft)
    build_habits(draft)
    for step in ("evaluation-frequency", "runtime", "run"):
        apply_rows(draft, step)


def build_length(draft: Draft) -> None:
    """Set the run's length in steps if given, else in epochs."""
    steps = draft.integer("trainer.total_training_steps")
    epochs = draft.integer("trainer.total_epochs")
    apply_rows(draft, "length", steps=steps, epochs=epochs)


@fact
def prompts_per_round(draft: Draft) -> int:
    """Return the prompts that each round of dynamic sampling took off the epochs; else 0."""
    prompts = draft.integer("data.train_batch_size") or 0
    if not filters_groups(draft) or is_second_trainer(draft) or not prompts:
        return 0
    return draft.integer(GENERATED) or prompts


def _async_length(draft: Draft) -> None:
    steps = num_weight_syncs(draft)
    if steps is None:
        build_length(draft)
        return
    # The sampler also stopped at the end of its epochs; until v0.7.0 it had an own number of them.
    limits = ["trainer.total_epochs", *([] if draft.since("v0.7.1") else ["rollout.total_epochs"])]
    apply_rows(
        draft,
        "async-length",
        steps=steps,
        limits=" and ".join(["rollout.total_rollout_steps", *limits]),
        epochs=min((each for key in limits if (each := draft.integer(key)) is not None), default=0),
    )


def build_habits(draft: Draft, *, kept: str = "trainer.max_actor_ckpt_to_keep") -> None:
    """Set checkpoints, resuming, logging and the folder.

    Args:
        draft: of the program.
        kept: key of the number of checkpoints to keep; empty if the release read none.
    """
    keeps = draft.integer(kept) if kept else None
    # The older switch wins over the number: _save_checkpoint reads it first.
    if draft.switch("trainer.remove_previous_ckpt_in_save"):
        keeps = 1
    # The old trainer kept every checkpoint unless it was told otherwise; ours keeps two.
    value = keeps if keeps is not None and keeps > 0 else None
    apply_rows(draft, "habits", kept=kept, keeps=value)


@fact
def resumes_from_path(draft: Draft) -> bool:
    path = draft.text("trainer.resume_from_path")
    # Old scripts wrote False to switch the path off.
    is_path = path.lower() not in ("", "false", "null")
    return draft.text("trainer.resume_mode") == "resume_path" and is_path


@fact
def has_own_folder(draft: Draft) -> bool:
    """Check if the user named the folder, which is made of project and experiment otherwise."""
    return "trainer.default_local_dir" in draft.old.origin


def _loggers(draft: Draft) -> list[str]:
    value = draft.old.get("trainer.logger")
    # Quoted lists come through shells as text.
    if isinstance(value, str) and value.strip().startswith("["):
        value = parse_value(value)[0]
    return [
        str(item) for item in (value if isinstance(value, list) else [value]) if item is not None
    ]


@fact
def trackers(draft: Draft) -> list[Plain]:
    """Return the loggers that exist in the new trainer."""
    # The file of metrics replaces the console: reports and comparisons read it.
    return ["jsonl", *(word for word in _loggers(draft) if word in _TRACKERS)]


@fact
def other_trackers(draft: Draft) -> str:
    known = (*_TRACKERS, "console", "file")
    return ", ".join(word for word in _loggers(draft) if word not in known)


@fact
def has_workers(draft: Draft) -> bool:
    """Check if the new actor runs in several processes."""
    workers = draft.settings.get("actor.num_workers")
    return workers is not None and isinstance(workers.value, int) and workers.value > 1
