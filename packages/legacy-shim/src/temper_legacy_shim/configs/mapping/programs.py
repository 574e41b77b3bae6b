"""Translate each old program: reinforcement learning, SFT, generation and evaluation."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import build_rl_data, put_source
from temper_legacy_shim.configs.mapping.rl.batches import build_batches, explain_unused
from temper_legacy_shim.configs.mapping.rl.reward_functions import build_reward
from temper_legacy_shim.configs.mapping.rl.rl_algorithm import build_algorithm, has_ref_role
from temper_legacy_shim.configs.mapping.rl.rl_facts import build_generation, needs_critic, needs_ref
from temper_legacy_shim.configs.mapping.rl.rollout import (
    build_rollout,
    build_staleness,
    build_teachers,
    build_turns,
)
from temper_legacy_shim.configs.mapping.rl.run_length import (
    build_habits,
    build_length,
    build_run,
    build_runtime,
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
    world_size,
)
from temper_legacy_shim.configs.mapping.rules import apply_rules
from temper_legacy_shim.configs.reading.config_values import from_home


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
    apply_rules(draft, "sft")
    if is_megatron(draft):
        draft.put("model_engine", "megatron", rule="model-engine", group=True)
    if not put_source(draft, new="data.train", old="data.train_files"):
        draft.find("data-files.no-demonstrations", "data.train_files")
    _evaluation(draft)
    build_role(draft, role)
    build_lora(draft, role)
    _lengths(draft, role)
    build_length(draft)
    # fsdp_sft_trainer.py computes the schedule from the epochs, and total_training_steps only ends
    # the run.
    if role is COLUMNS and "run.total_steps" in draft.settings:
        epochs = draft.integer("trainer.total_epochs") or 1
        draft.find("sft-schedule-length", "trainer.total_training_steps", epochs=epochs)
    build_habits(draft, kept="trainer.max_ckpt_to_keep" if draft.since("v0.5.0") else None)
    build_runtime(draft)
    apply_rules(draft, "seed", old="trainer.seed")
    apply_rules(draft, "sft-max-rows")
    if world_size(draft) is None:
        draft.find("sft-cluster")
    _custom(draft)


def _evaluation(draft: Draft) -> None:
    """Set the held-out demonstrations, and the steps between two measures of their loss."""
    key = "trainer.test_freq"
    if not put_source(draft, new="data.eval", old="data.val_files"):
        draft.explain_drop(key, "without data.val_files nothing is evaluated")
    elif draft.old.has(key) and draft.text(key) != "after_each_epoch":
        apply_rules(draft, "test-freq")
    elif (epochs := draft.integer("trainer.total_epochs") or 1) > 1:
        draft.find("sft-val", key, epochs=epochs)


def _sources(draft: Draft) -> list[str]:
    return ["data.train", *["data.eval"] * ("data.eval.paths" in draft.settings)]


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
        for source in _sources(draft):
            old = [f"data.{column}", f"data.{fields}"]
            draft.put(f"{source}.{new}", path, rule="sft-columns", old=old)
    apply_rules(draft, "sft-chat")


def _messages(draft: Draft, key: str) -> None:
    for source in _sources(draft):
        draft.put(
            f"{source}.messages_key",
            draft.text(key) or "messages",
            rule="sft-messages",
            old=[key],
            verbatim=True,
        )
    thinking = "data.enable_thinking_default"
    given, name = draft.old.get(thinking), "enable_thinking"
    # The default is the text none, which Python takes for true.
    if given is not None and draft.old.is_set(thinking):
        draft.find("chat-template-kwargs", thinking, source=thinking, name=name, value=bool(given))
    elif given is not None:
        draft.find("chat-template-kwargs.default", thinking)
    if draft.text("data.tools_key") and draft.old.is_set("data.tools_key"):
        draft.find("sft-tools", "data.tools_key")


def _custom(draft: Draft) -> None:
    path = draft.text("data.custom_cls.path")
    if path and path.lower() not in ("null", "none"):
        draft.find("custom-dataset.demonstrations", "data.custom_cls.path", path=path)


_MICRO_BATCH = 16384
"""Our default cap of a micro-batch, which a longest sample must fit into."""


def build_generate_task(draft: Draft) -> None:
    apply_rules(draft, "generation")
    is_server = draft.old.has("actor_rollout_ref.rollout.n")  # composed on the tree of main_ppo
    path = (
        "actor_rollout_ref.model.path"
        if draft.text("actor_rollout_ref.model.path")
        else "model.path"
    )
    if draft.text(path):
        here = from_home(draft.text(path))
        draft.put(
            "actor.engine.model.path",
            here,
            rule="model-path",
            old=[path],
            verbatim=here == draft.text(path),
        )
    else:
        draft.find("model-path.generation", "model.path")
    files = "data.path" if draft.text("data.path") else "data.train_files"
    if not put_source(draft, new="data.train", old=files):
        draft.find("data-files.no-path", "data.path")
    draft.put(
        "data.train.prompt_key",
        draft.text("data.prompt_key") or "prompt",
        rule="prompt-key",
        old=["data.prompt_key"],
        verbatim=True,
    )
    draft.put("data.train.answer_key", "reward_model.ground_truth", rule="answer-key")
    _sampling(draft, "actor_rollout_ref.rollout" if is_server else "rollout", is_server=is_server)
    _output(draft)
    build_runtime(draft)


def _sampling(draft: Draft, block: str, *, is_server: bool) -> None:
    for name, key in (("temperature", "temperature"), ("top-p", "top_p"), ("top-k", "top_k")):
        # It is commented out in the arguments that main_generation_server.py sends.
        if is_server and key == "top_k":
            draft.explain_drop(
                f"{block}.top_k",
                "the program with servers did not pass it on, and drew from all tokens",
            )
            continue
        apply_rules(draft, name, old=f"{block}.{key}")
    length = (
        f"{block}.response_length"
        if draft.old.has(f"{block}.response_length")
        else "data.max_response_length"
    )
    draft.copy("sampling.max_tokens", length, rule="response-length", expected="number")
    prompt = (
        f"{block}.prompt_length"
        if draft.old.has(f"{block}.prompt_length")
        else "data.max_prompt_length"
    )
    apply_rules(draft, "prompt-length", old=prompt)
    # The engine checks that the longest sample fits into a micro-batch, also where it only samples.
    longest = (draft.integer(prompt) or 0) + (draft.integer(length) or 0)
    if longest > _MICRO_BATCH:
        draft.put("batching.max_tokens", longest, rule="token-budget", old=[prompt, length])
    count = "data.n_samples" if draft.old.has("data.n_samples") else f"{block}.n"
    draft.put(
        "generate.num_completions",
        max(1, draft.integer(count) or 1),
        rule="gen-samples",
        old=[count],
        verbatim=True,
    )
    name = draft.text(f"{block}.name") or "vllm"
    draft.put("rollout", "hf", rule="rollout-name", old=[f"{block}.name"], group=True)
    if name != "hf":
        draft.find("gen-sampler", f"{block}.name", block=block, name=name)
    if draft.number(f"{block}.temperature") == 0:
        for key in (f"{block}.top_p", f"{block}.top_k"):
            draft.explain_drop(key, "greedy completions are not drawn")


def _output(draft: Draft) -> None:
    key = "data.output_path"
    path = draft.text(key)
    if not path:
        return
    folder, _, file = path.rpartition("/")
    name = file.rpartition(".")[0] or "completions"
    folder = f"{folder or 'runs'}/{name}"
    draft.put("generate.file", f"{name}.jsonl", rule="gen-output", old=[key])
    draft.put("run.dir", folder, rule="gen-output", old=[key])
    draft.find("gen-output", key, file=f"{folder}/{name}.jsonl")


def build_evaluation(draft: Draft) -> None:
    """Report that the task eval generates and scores in one run."""
    draft.find("evaluation")


def build_ppo(draft: Draft) -> None:
    """Set everything in order; roles come last, since the algorithm decides which exist."""
    if is_megatron(draft):
        draft.put(
            "model_engine",
            "megatron",
            rule="model-engine",
            old=["actor_rollout_ref.actor.strategy"],
            group=True,
        )
    if needs_critic(draft):
        draft.put("critic", "value_model", rule="critic", group=True)
    build_rl_data(draft)
    build_role(draft, ACTOR)
    build_lora(draft, ACTOR)
    build_batches(draft)
    explain_unused(draft)
    build_algorithm(draft)
    if needs_critic(draft):
        build_role(draft, CRITIC)
        build_lora(draft, CRITIC)
    else:
        draft.explain_drop("critic", "the estimator needs no critic, so there is none")
    if has_ref_role(draft):
        build_role(draft, REF)
        _ref_model(draft)
    else:
        without = "no KL coefficient is above 0, so there is no reference policy"
        draft.explain_drop(
            "actor_rollout_ref.ref",
            "there is no reference model of its own" if needs_ref(draft) else without,
        )
    build_rollout(draft)
    build_selection(draft)
    build_turns(draft)
    build_staleness(draft)
    build_teachers(draft)
    build_reward(draft)
    build_run(draft)
    build_numerics(draft)
    build_generation(draft)
    find_refusals(draft)


def _ref_model(draft: Draft) -> None:
    """Set the reference's own model, which only the old FSDP workers of some releases read."""
    # fsdp_workers.py reads ref.model.path from v0.6.0 on. Megatron's workers and the engines build
    # the reference from the actor's path.
    old_workers = not is_megatron(draft) and not has_engines(draft)
    if old_workers and draft.since("v0.6.0") and not draft.since("v0.8.0"):
        apply_rules(draft, "ref-model")
    else:
        draft.explain_drop(
            "actor_rollout_ref.ref.model.path", "the workers of this release did not read it"
        )


def find_refusals(draft: Draft) -> None:
    """Report each value with which the old run would have ended before its first step."""
    mode = "actor_rollout_ref.rollout.mode"
    # RolloutConfig.__post_init__ raises for it since v0.7.0.
    if draft.since("v0.7.0") and draft.text(mode) == "sync":
        draft.find("rollout-mode", mode)
    if not (is_megatron(draft) and draft.since("v0.7.0") and has_engines(draft)):
        return
    for role in (ACTOR, REF, CRITIC):
        key = f"{role.megatron}.use_mbridge"
        if draft.old.is_set(key) and not draft.switch(key):
            draft.find("mbridge", key)
