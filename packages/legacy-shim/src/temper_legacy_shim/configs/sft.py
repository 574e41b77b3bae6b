"""Supervised fine-tuning of both old generations."""

from temper_legacy_shim.configs.draft import Draft


def build_columns(draft: Draft) -> None:
    """The first generation: question and answer in columns."""
    draft.find("person", "sft", "supervised fine-tuning is not translated yet.")


def build_sft(draft: Draft) -> None:
    """The second generation: conversations, on engines."""
    draft.find("person", "sft", "supervised fine-tuning is not translated yet.")
