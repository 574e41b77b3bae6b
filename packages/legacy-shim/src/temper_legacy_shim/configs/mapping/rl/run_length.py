"""Length, place and habits of a run."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import evaluates
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    GENERATED,
    evaluation_key,
    filters_groups,
    is_async,
    is_second_trainer,
    num_weight_syncs,
)
from temper_legacy_shim.configs.mapping.roles.roles import CLUSTER_KEYS
from temper_legacy_shim.configs.mapping.rules import apply_rules
from temper_legacy_shim.configs.reading.config_values import Plain, parse_value

_TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


def build_run(draft: Draft) -> None:
    """Set the blocks ``run`` and ``runtime``."""
    if is_async(draft):
        _async_length(draft)
    else:
        build_length(draft)
    build_habits(draft)
    if evaluates(draft):
        apply_rules(draft, "test-freq", old=evaluation_key(draft))
    build_runtime(draft)
    # fit() updated only the critic until this step.
    if steps := draft.integer("trainer.critic_warmup"):
        draft.find("critic-warmup", "trainer.critic_warmup", steps=steps)
    callback = draft.text("trainer.checkpoint_callback_class")
    if callback:
        draft.find("checkpoint-callback", "trainer.checkpoint_callback_class", callback=callback)
    if draft.switch("trainer.val_only"):
        draft.find("val-only", "trainer.val_only")


def build_length(draft: Draft) -> None:
    """Set the run's length in steps if given, else in epochs."""
    steps, epochs = (
        draft.integer("trainer.total_training_steps"),
        draft.integer("trainer.total_epochs"),
    )
    if steps is not None and steps > 0:
        draft.put(
            "run.total_steps",
            steps,
            rule="total-steps",
            old=["trainer.total_training_steps"],
            verbatim=True,
        )
        draft.explain_drop(
            "trainer.total_epochs", "trainer.total_training_steps is set and ends the run"
        )
        # The old loop went over the epochs and left at this step, so the epochs can end first.
        if epochs is not None:
            keys = ("trainer.total_training_steps", "trainer.total_epochs")
            draft.find("total-steps", *keys, steps=steps, epochs=epochs)
        return
    if steps is not None:
        draft.find("total-steps.none", "trainer.total_training_steps", steps=steps)
    if epochs is None:
        return
    if epochs < 1:
        draft.find("total-epochs.none", "trainer.total_epochs", epochs=epochs)
    draft.put(
        "run.total_epochs",
        max(1, epochs),
        rule="total-epochs",
        old=["trainer.total_epochs"],
        verbatim=True,
    )
    prompts = draft.integer("data.train_batch_size")
    if filters_groups(draft) and not is_second_trainer(draft) and prompts:
        draft.find(
            "total-epochs",
            "trainer.total_epochs",
            epochs=epochs,
            prompts=prompts,
            each=draft.integer(GENERATED) or prompts,
        )


def _async_length(draft: Draft) -> None:
    steps, keys = num_weight_syncs(draft)
    if steps is None:
        build_length(draft)
        return
    draft.put("run.total_steps", steps, rule="async-length", old=keys)
    # The sampler also stopped at the end of its epochs; until v0.7.0 it had an own number of them.
    limits = ["trainer.total_epochs", *([] if draft.since("v0.7.1") else ["rollout.total_epochs"])]
    epochs = [number for key in limits if (number := draft.integer(key)) is not None]
    if epochs:
        draft.find("total-steps", keys[0], *limits, steps=steps, epochs=min(epochs))
    for name in ("trainer.total_training_steps", "trainer.total_epochs", "rollout.total_epochs"):
        draft.explain_drop(name, f"{keys[0]} is taken as the end of the run")


def build_habits(draft: Draft, *, kept: str | None = "trainer.max_actor_ckpt_to_keep") -> None:
    """Set checkpoints, resuming, logging and the folder.

    Args:
        draft: of the program.
        kept: key of the number of checkpoints to keep; None if the release read none.
    """
    # The old trainer saved by steps alone; ours also saves by time, which the row turns off.
    apply_rules(draft, "save-freq")
    keeps = draft.integer(kept) if kept else None
    # The older switch wins over the number: _save_checkpoint reads it first.
    if draft.switch("trainer.remove_previous_ckpt_in_save"):
        keeps = 1
    # The old trainer kept every checkpoint unless it was told otherwise; ours keeps two.
    old = [*([kept] if kept else []), "trainer.remove_previous_ckpt_in_save"]
    value = keeps if keeps is not None and keeps > 0 else None
    draft.put("run.max_ckpt_to_keep", value, rule="keep-checkpoints", old=old)
    _resume(draft)
    folder = draft.text("trainer.default_local_dir")
    if folder:
        old = ["trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"]
        is_own = "trainer.default_local_dir" in draft.old.origin
        draft.put(
            "run.dir", folder, rule="run-dir", old=old[:1] if is_own else old, verbatim=is_own
        )
    _trackers(draft)


def _resume(draft: Draft) -> None:
    mode, path = draft.text("trainer.resume_mode") or "auto", draft.text("trainer.resume_from_path")
    # Old scripts wrote False to switch the path off.
    if mode == "resume_path" and path and path.lower() not in ("false", "null"):
        draft.find("resume-path", "trainer.resume_from_path", path=path)
        return
    if mode != "disable" and draft.old.is_set("trainer.default_local_dir"):
        draft.find(
            "resume", "trainer.default_local_dir", value=draft.text("trainer.default_local_dir")
        )
    # auto looks for latest_checkpointed_iteration.txt in default_local_dir (_load_checkpoint).
    draft.put(
        "run.resume",
        "never" if mode in ("disable", "never") else "auto",
        rule="resume",
        old=["trainer.resume_mode"],
    )


def _trackers(draft: Draft) -> None:
    value = draft.old.get("trainer.logger")
    # Quoted lists come through shells as text.
    if isinstance(value, str) and value.strip().startswith("["):
        value = parse_value(value)[0]
    words = [
        str(item) for item in (value if isinstance(value, list) else [value]) if item is not None
    ]
    # The file of metrics replaces the console: reports and comparisons read it.
    trackers: list[Plain] = ["jsonl", *(word for word in words if word in _TRACKERS)]
    draft.put("run.trackers", trackers, rule="trackers", old=["trainer.logger"])
    others = [word for word in words if word not in _TRACKERS and word not in ("console", "file")]
    if others:
        draft.find("trackers", "trainer.logger", names=", ".join(others))


def build_runtime(draft: Draft) -> None:
    """Set the runtime: one process, or Ray."""
    workers = draft.settings.get("actor.num_workers")
    # One worker needs no Ray: trainer, model and sampler run in one process.
    if workers is None or not isinstance(workers.value, int) or workers.value < 2:
        return
    draft.put("runtime.kind", "ray", rule="runtime", old=CLUSTER_KEYS)
    device = draft.text("trainer.device")
    if device != "cpu":
        draft.put("runtime.gpus_per_worker", 1.0, rule="runtime", old=CLUSTER_KEYS)
