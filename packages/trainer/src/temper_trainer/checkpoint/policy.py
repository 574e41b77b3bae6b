"""What the start of a run says about its checkpoints."""

from temper_trainer.config.run import RunConfig


def describe_policy(run: RunConfig) -> str:
    """Return the line that says when a run saves and what it keeps."""
    steps = "step" if run.save_every == 1 else f"{run.save_every} steps"
    when = [] if run.save_interval_s is None else [f"every {_duration(run.save_interval_s)}"]
    when += [f"every {steps}"] if run.save_every else []
    return f"checkpoints: saved {', '.join(when)}{' and ' if when else ''}at the end; {describe_retention(run)}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"


def describe_retention(run: RunConfig) -> str:
    """Return which checkpoints a run keeps, as the end of a line."""
    if run.max_ckpt_to_keep is None:
        return "all are kept"
    permanent = f" and every {run.keep_every}th step" if run.keep_every else ""
    if run.max_ckpt_to_keep == 1:
        newest, verb = "the newest verified one", "are" if permanent else "is"
    else:
        newest, verb = f"the newest {run.max_ckpt_to_keep} verified ones", "are"
    return f"{newest}{permanent} {verb} kept, older ones that this run wrote are deleted"
