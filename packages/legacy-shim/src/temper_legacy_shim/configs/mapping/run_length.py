"""Length, place and habits of a run."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import evaluates
from temper_legacy_shim.configs.mapping.rl_facts import evaluation_key, is_async, num_weight_syncs
from temper_legacy_shim.configs.mapping.roles import CLUSTER_KEYS
from temper_legacy_shim.configs.reading.config_values import Plain, parse_value

_TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


def build_run(draft: Draft) -> None:
    """The blocks ``run`` and ``runtime``."""
    if is_async(draft):
        _async_length(draft)
    else:
        build_length(draft)
    build_habits(draft)
    if evaluates(draft):
        key = evaluation_key(draft)
        draft.put("run.eval_every", max(0, draft.frequency(key)), rule="test-freq", old=[key])
    build_runtime(draft)
    _warmup_of_critic(draft)
    callback = draft.text("trainer.checkpoint_callback_class")
    if callback:
        draft.find(
            "person",
            "checkpoint-callback",
            f"trainer.checkpoint_callback_class is {callback}: a class of yours ran after each save, and nothing here calls it. Do its "
            "work on the finished step directories, and take the key out.",
            "trainer.checkpoint_callback_class",
        )
    if draft.switch("trainer.val_only"):
        draft.find(
            "person",
            "val-only",
            "trainer.val_only is true: the old run evaluated and did not train. Here that is task=eval, without the keys of training.",
            "trainer.val_only",
        )


def build_length(draft: Draft) -> None:
    """Steps where they are given, else epochs."""
    steps, epochs = draft.integer("trainer.total_training_steps"), draft.integer("trainer.total_epochs")
    if steps is not None and steps > 0:
        draft.put("run.total_steps", steps, rule="total-steps", old=["trainer.total_training_steps"], verbatim=True)
        draft.say("trainer.total_epochs", "trainer.total_training_steps is set and ends the run")
        if epochs is not None:
            _epochs_may_end_first(draft, steps=steps, epochs=epochs)
        return
    if epochs is None:
        return
    draft.put("run.total_epochs", max(1, epochs), rule="total-epochs", old=["trainer.total_epochs"], verbatim=True)


def _epochs_may_end_first(draft: Draft, *, steps: int, epochs: int) -> None:
    draft.find(
        "note",
        "total-steps",
        f"the old run ended after {steps} steps or {epochs} epochs, whichever came first; here it is {steps} steps.",
        "trainer.total_training_steps",
        "trainer.total_epochs",
    )


def _async_length(draft: Draft) -> None:
    steps, keys = num_weight_syncs(draft)
    if steps is None:
        build_length(draft)
        return
    draft.put("run.total_steps", steps, rule="async-length", old=keys)
    for name in ("trainer.total_training_steps", "trainer.total_epochs", "rollout.total_epochs"):
        draft.say(name, f"{keys[0]} ends the run")


def build_habits(draft: Draft) -> None:
    """Checkpoints, resuming, logging, the folder."""
    draft.put("run.save_every", max(0, draft.frequency("trainer.save_freq")), rule="save-freq", old=["trainer.save_freq"])
    # The old trainer saved by steps alone; ours also saves by time.
    draft.put("run.save_interval_s", None, rule="save-freq", old=["trainer.save_freq"])
    keeps = draft.integer("trainer.max_actor_ckpt_to_keep")
    if keeps is None and draft.switch("trainer.remove_previous_ckpt_in_save"):
        keeps = 1
    # The old trainer kept every checkpoint unless it was told otherwise; ours keeps two.
    old = ["trainer.max_actor_ckpt_to_keep", "trainer.remove_previous_ckpt_in_save"]
    value = keeps if keeps is not None and keeps > 0 else None
    draft.put("run.max_ckpt_to_keep", value, rule="keep-checkpoints", old=old)
    _resume(draft)
    folder = draft.text("trainer.default_local_dir")
    if folder:
        old = ["trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"]
        is_own = "trainer.default_local_dir" in draft.old.origin
        draft.put("run.dir", folder, rule="run-dir", old=old[:1] if is_own else old, verbatim=is_own)
    _trackers(draft)


def _resume(draft: Draft) -> None:
    mode, path = draft.text("trainer.resume_mode") or "auto", draft.text("trainer.resume_from_path")
    if mode == "resume_path" and path and path.lower() not in ("false", "null"):
        draft.find(
            "person",
            "resume-path",
            f"trainer.resume_from_path is {path}, an old checkpoint: convert it with `temper-migrate checkpoint {path} --to temper`, and "
            "set run.resume to the folder that this makes.",
            "trainer.resume_from_path",
        )
        return
    if mode != "disable" and draft.old.is_set("trainer.default_local_dir"):
        draft.find(
            "note",
            "resume",
            f"checkpoints of the old run in {draft.text('trainer.default_local_dir')} are left alone: convert the last one with "
            "`temper-migrate checkpoint` where the run shall go on.",
            "trainer.default_local_dir",
        )
    draft.put("run.resume", "never" if mode in ("disable", "never") else "auto", rule="resume", old=["trainer.resume_mode"])


def _trackers(draft: Draft) -> None:
    value = draft.old.get("trainer.logger")
    if isinstance(value, str) and value.strip().startswith("["):
        value = parse_value(value)[0]
    words = [str(item) for item in (value if isinstance(value, list) else [value]) if item is not None]
    trackers: list[Plain] = ["jsonl", *(word for word in words if word in _TRACKERS)]
    draft.put("run.trackers", trackers, rule="trackers", old=["trainer.logger"])
    others = [word for word in words if word not in _TRACKERS and word not in ("console", "file")]
    if others:
        draft.find(
            "hazard",
            "trackers",
            f"trainer.logger names {', '.join(others)}, which is no tracker here; metrics.jsonl has every number.",
            "trainer.logger",
        )


def build_runtime(draft: Draft) -> None:
    """One process, or Ray."""
    workers = draft.settings.get("actor.num_workers")
    if workers is None or not isinstance(workers.value, int) or workers.value < 2:
        return
    draft.put("runtime.kind", "ray", rule="runtime", old=CLUSTER_KEYS)
    device = draft.text("trainer.device")
    if device != "cpu":
        draft.put("runtime.gpus_per_worker", 1.0, rule="runtime", old=CLUSTER_KEYS)


def _warmup_of_critic(draft: Draft) -> None:
    steps = draft.integer("trainer.critic_warmup")
    if steps:
        draft.find(
            "person",
            "critic-warmup",
            f"trainer.critic_warmup is {steps}: the actor was frozen for so many steps, which nothing here does. Set it to 0, or train the "
            "critic first.",
            "trainer.critic_warmup",
        )
