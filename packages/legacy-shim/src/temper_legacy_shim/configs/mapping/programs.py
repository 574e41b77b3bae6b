"""Translate each old program: reinforcement learning, SFT, generation and evaluation."""

from collections.abc import Sequence

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.batches import build_batches
from temper_legacy_shim.configs.mapping.rl.reward_functions import build_reward
from temper_legacy_shim.configs.mapping.rl.rl_algorithm import build_algorithm
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    evaluates,
    has_eval_data,
    is_async,
    needs_critic,
)
from temper_legacy_shim.configs.mapping.rl.rollout import (
    build_rollout,
    build_teachers,
    build_turns,
)
from temper_legacy_shim.configs.mapping.rl.run_length import (
    build_habits,
    build_length,
    build_run,
)
from temper_legacy_shim.configs.mapping.rl.selection import build_selection
from temper_legacy_shim.configs.mapping.roles.numerics_changes import build_numerics, has_engines
from temper_legacy_shim.configs.mapping.roles.role_engine import build_lora, build_role
from temper_legacy_shim.configs.mapping.roles.roles import (
    ACTOR,
    COLUMNS,
    CRITIC,
    REF,
    SFT,
    OldRole,
    data_parallel,
    is_megatron,
    sequence_parallel,
    ulysses_keys,
)
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact
from temper_legacy_shim.configs.reading.config_values import Plain, from_home, parse_value


def paths_of(draft: Draft, key: str) -> list[str]:
    """Return the files of an old key: a list, a path, or a list in a string."""
    value = draft.old.get(key)
    if isinstance(value, str) and value.strip().startswith("["):
        value = parse_value(value.strip())[0]
    if value in (None, ""):
        return []
    items: Sequence[Plain] = value if isinstance(value, list) else [value]
    return [from_home(str(item)) for item in items if item not in (None, "")]


def put_source(draft: Draft, *, new: str, old: str) -> None:
    """Set a data source, or ask for the one that is trained on."""
    paths = paths_of(draft, old)
    kinds = {"jsonl" if path.endswith((".jsonl", ".json")) else "parquet" for path in paths}
    apply_rows(
        draft,
        "files",
        source=new,
        files=old,
        paths=paths,
        kind=next(iter(kinds)) if len(kinds) == 1 else "parquet",
        is_mixed=len(kinds) > 1,
        has_json=any(path.endswith(".json") for path in paths),
    )


def sources(draft: Draft) -> list[str]:
    return ["data.train", *["data.eval"] * has_eval_data(draft)]


def build_rl_data(draft: Draft) -> None:
    """Set training and held-out prompts of a PPO-like run."""
    put_source(draft, new="data.train", old="data.train_files")
    if evaluates(draft):
        put_source(draft, new="data.eval", old="data.val_files")
    for source in sources(draft):
        apply_rows(draft, "data-source", source=source)
    apply_rows(draft, "prompts")


def build_columns(draft: Draft) -> None:
    """Build a first-generation run: question and answer columns, or conversations if configured."""
    _build(draft, COLUMNS)
    if draft.switch("data.multiturn.enable"):
        _messages(draft, "data.multiturn.messages_key")
    else:
        _columns(draft)
    draft.find("sft-normalization", "data.micro_batch_size_per_gpu")


def build_sft(draft: Draft) -> None:
    """Build a second-generation run: conversations, on engines."""
    _build(draft, SFT)
    _messages(draft, "data.messages_key")


def _build(draft: Draft, role: OldRole) -> None:
    apply_rows(draft, "sft")
    put_source(draft, new="data.train", old="data.train_files")
    put_source(draft, new="data.eval", old="data.val_files")
    apply_rows(draft, "sft-evaluation")
    build_role(draft, role)
    build_lora(draft, role)
    apply_rows(draft, "sft-lengths")
    longest = draft.integer("data.max_length")
    if longest is not None:
        _tokens(draft, role, longest=longest)
    build_length(draft)
    build_habits(draft, kept="trainer.max_ckpt_to_keep" if draft.since("v0.5.0") else "")
    apply_rows(draft, "runtime")
    apply_rows(draft, "sft-data")


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
    for new, column in (("prompt", "prompt"), ("answer", "response")):
        fields = f"{column}_dict_keys"
        inner = draft.old.get(f"data.{fields}")
        names = [str(name) for name in (inner if isinstance(inner, list) else [inner]) if name]
        if len(names) > 1:
            draft.find("sft-columns", f"data.{fields}", fields=fields, names=names)
        path = ".".join([draft.text(f"data.{column}_key"), *names[:1]])
        for source in sources(draft):
            apply_rows(draft, "column", source=source, new_column=new, column=column, path=path)
    apply_rows(draft, "columns")


def _messages(draft: Draft, key: str) -> None:
    for source in sources(draft):
        apply_rows(draft, "messages", source=source, messages_key=key)
    thinking = "data.enable_thinking_default"
    given, name = draft.old.get(thinking), "enable_thinking"
    # The default is the text none, which Python takes for true.
    if given is not None and draft.old.is_set(thinking):
        draft.find("chat-template-kwargs", thinking, source=thinking, name=name, value=bool(given))
    elif given is not None:
        draft.find("chat-template-kwargs.default", thinking)
    apply_rows(draft, "sft-tools")


_MICRO_BATCH = 16384
"""Our default cap of a micro-batch, which a longest sample must fit into."""


def build_generate_task(draft: Draft) -> None:
    apply_rows(draft, "generation")
    is_server = draft.old.has("actor_rollout_ref.rollout.n")  # composed on the tree of main_ppo
    files = "data.path" if draft.text("data.path") else "data.train_files"
    put_source(draft, new="data.train", old=files)
    apply_rows(draft, "generation-data")
    _sampling(draft, "actor_rollout_ref.rollout" if is_server else "rollout", is_server=is_server)
    _output(draft)
    apply_rows(draft, "runtime")


def _sampling(draft: Draft, block: str, *, is_server: bool) -> None:
    prompt, length = f"{block}.prompt_length", f"{block}.response_length"
    if not draft.old.has(prompt):
        prompt = "data.max_prompt_length"
    if not draft.old.has(length):
        length = "data.max_response_length"
    # The engine checks that the longest sample fits into a micro-batch, also where it only samples.
    longest = (draft.integer(prompt) or 0) + (draft.integer(length) or 0)
    apply_rows(
        draft,
        "generation-sampling",
        block=block,
        is_server=is_server,
        prompt=prompt,
        length=length,
        longest=longest if longest > _MICRO_BATCH else 0,
        count="data.n_samples" if draft.old.has("data.n_samples") else f"{block}.n",
        name=draft.text(f"{block}.name") or "vllm",
    )


def _output(draft: Draft) -> None:
    key = "data.output_path"
    path = draft.text(key)
    if not path:
        return
    folder, _, file = path.rpartition("/")
    name = file.rpartition(".")[0] or "completions"
    folder = f"{folder or 'runs'}/{name}"
    apply_rows(draft, "generation-output", file=f"{name}.jsonl", folder=folder)


def build_evaluation(draft: Draft) -> None:
    """Report that the task eval generates and scores in one run."""
    apply_rows(draft, "evaluation")


def build_ppo(draft: Draft) -> None:
    """Set everything in order; roles come last, since the algorithm decides which exist."""
    apply_rows(draft, "ppo")
    build_rl_data(draft)
    build_role(draft, ACTOR)
    build_lora(draft, ACTOR)
    build_batches(draft)
    apply_rows(draft, "log-probs")
    build_algorithm(draft)
    if needs_critic(draft):
        build_role(draft, CRITIC)
        build_lora(draft, CRITIC)
    apply_rows(draft, "critic")
    if "ref" in draft.settings:
        build_role(draft, REF)
    apply_rows(draft, "reference")
    build_rollout(draft)
    build_selection(draft)
    build_turns(draft)
    if is_async(draft):
        apply_rows(draft, "staleness")
    build_teachers(draft)
    build_reward(draft)
    build_run(draft)
    build_numerics(draft)
    apply_rows(draft, "trainer-generation")
    apply_rows(draft, "refusals")


@fact
def reads_ref_path(draft: Draft) -> bool:
    """Check if the workers read the path of the reference; else it has the actor's."""
    # fsdp_workers.py reads ref.model.path from v0.6.0 on. Megatron's workers and the engines build
    # the reference from the actor's path.
    old_workers = not is_megatron(draft) and not has_engines(draft)
    return old_workers and draft.since("v0.6.0") and not draft.since("v0.8.0")
