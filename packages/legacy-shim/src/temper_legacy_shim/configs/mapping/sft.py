"""Supervised fine-tuning of both old generations.

The first had columns of questions and answers, the second conversations on engines.
"""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import put_source
from temper_legacy_shim.configs.mapping.rl.run_length import (
    build_habits,
    build_length,
    build_runtime,
)
from temper_legacy_shim.configs.mapping.roles.lora import build_lora
from temper_legacy_shim.configs.mapping.roles.role_engine import build_role
from temper_legacy_shim.configs.mapping.roles.roles import (
    COLUMNS,
    SFT,
    OldRole,
    data_parallel,
    is_megatron,
    sequence_parallel,
    ulysses_keys,
    world_size,
)
from temper_legacy_shim.configs.mapping.rules import apply_rules


def build_columns(draft: Draft) -> None:
    """Build a first-generation run: question and answer columns, or conversations if configured."""
    _build(draft, COLUMNS)
    if draft.switch("data.multiturn.enable"):
        _messages(draft, "data.multiturn.messages_key")
    else:
        _columns(draft)
    draft.find("sft-normalisation", "data.micro_batch_size_per_gpu")


def build_sft(draft: Draft) -> None:
    """Build a second-generation run: conversations, on engines."""
    _build(draft, SFT)
    _messages(draft, "data.messages_key")


def _build(draft: Draft, role: OldRole) -> None:
    apply_rules(draft, "sft")
    if is_megatron(draft):
        draft.put("model_engine", "megatron", rule="model-engine", group=True)
    if not put_source(draft, new="data.train", old="data.train_files"):
        draft.find("data-files.no-demonstrations", "data.train_files")
    draft.explain_drop("data.val_files", "the loss on held-out demonstrations is not measured here")
    build_role(draft, role)
    build_lora(draft, role)
    _lengths(draft, role)
    build_length(draft)
    build_habits(draft)
    build_runtime(draft)
    apply_rules(draft, "seed", old="trainer.seed")
    if world_size(draft) is None:
        draft.find("sft-cluster")
    _custom(draft)


def _lengths(draft: Draft, role: OldRole) -> None:
    apply_rules(draft, "prompts-per-step")
    apply_rules(draft, "prompt-length", old="data.max_length")
    cut = draft.text("data.truncation") or "error"
    draft.put(
        "data.overlong_prompts",
        "error" if cut == "error" else "drop",
        rule="overlong-prompts",
        old=["data.truncation"],
    )
    if cut != "error":
        draft.find("overlong-prompts.demonstrations", "data.truncation", cut=cut)
    longest = draft.integer("data.max_length")
    if longest is not None:
        _tokens(draft, role, longest=longest)


def _tokens(draft: Draft, role: OldRole, *, longest: int) -> None:
    sharing = (
        (draft.integer("engine.context_parallel_size") or 1)
        if is_megatron(draft)
        else sequence_parallel(draft, role)
    )
    if draft.switch("data.use_dynamic_bsz"):
        budget = (draft.integer("data.max_token_len_per_gpu") or longest) * sharing
        old = ["data.max_token_len_per_gpu", *(ulysses_keys(role) if sharing > 1 else [])]
    else:
        budget = _micro(draft, role) * longest
        old = ["data.micro_batch_size_per_gpu", "data.micro_batch_size", "data.max_length"]
    draft.put("batching.max_tokens", max(budget, longest), rule="token-budget", old=old)


def _micro(draft: Draft, role: OldRole) -> int:
    """Return the demonstrations of a micro-batch on one rank."""
    full, each = (
        draft.integer("data.micro_batch_size"),
        draft.integer("data.micro_batch_size_per_gpu"),
    )
    if full is None or not draft.old.is_set("data.micro_batch_size"):
        return max(1, each or 1)
    ranks = data_parallel(draft, role)
    if ranks is None:
        return max(1, full)
    if full % ranks:
        draft.find(
            "micro-batch-global.demonstrations",
            "data.micro_batch_size",
            full=full,
            ranks=ranks,
            detail=max(1, full // ranks),
        )
    return max(1, full // ranks)


def _columns(draft: Draft) -> None:
    for new, column, fields in (
        ("prompt_key", "prompt_key", "prompt_dict_keys"),
        ("answer_key", "response_key", "response_dict_keys"),
    ):
        key, inner = draft.text(f"data.{column}"), draft.old.get(f"data.{fields}")
        names = (
            [str(name) for name in inner]
            if isinstance(inner, list)
            else [str(inner)]
            if inner
            else []
        )
        if len(names) > 1:
            draft.find("sft-columns", f"data.{fields}", fields=fields, names=names)
        path = ".".join([key, *names[:1]])
        draft.put(
            f"data.train.{new}", path, rule="sft-columns", old=[f"data.{column}", f"data.{fields}"]
        )
    apply_rules(draft, "sft-chat")


def _messages(draft: Draft, key: str) -> None:
    draft.put(
        "data.train.messages_key",
        draft.text(key) or "messages",
        rule="sft-messages",
        old=[key],
        verbatim=True,
    )
    if draft.text("data.tools_key") and draft.old.is_set("data.tools_key"):
        draft.find("sft-tools", "data.tools_key")


def _custom(draft: Draft) -> None:
    path = draft.text("data.custom_cls.path")
    if path and path.lower() not in ("null", "none"):
        draft.find("custom-dataset.demonstrations", "data.custom_cls.path", path=path)
