"""Where deprecated workers are found; no code of theirs is imported from here."""

GROUP = "temper.legacy_workers"
"""Entry-point group that temper-legacy-shim fills."""
TRAINING_WORKER = "training_worker"
"""The entry point that is a ``TrainingWorker`` around them."""
