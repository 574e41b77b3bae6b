"""Offline evaluation: scoring completions that were made before."""

from temper_legacy_shim.configs.draft import Draft


def build_evaluation(draft: Draft) -> None:
    """Task eval makes and scores completions in one go."""
    draft.find(
        "person",
        "evaluation",
        "the old program scored completions that another one had written: here `temper-train task=eval` makes and scores them in one go. "
        "Translate the generation instead, and choose its reward.function.",
    )
