"""Offline generation: prompts in, completions out."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import put_source
from temper_legacy_shim.configs.mapping.rl.run_length import build_runtime
from temper_legacy_shim.configs.mapping.rules import apply_rules
from temper_legacy_shim.configs.reading.config_values import from_home

_MICRO_BATCH = 16384
"""Our default cap of a micro-batch, which a longest sample must fit into."""


def build_generation(draft: Draft) -> None:
    """Set the task generate, from either old tree."""
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
    name = path.rpartition("/")[2].rpartition(".")[0] or "completions"
    draft.put("generate.file", f"{name}.jsonl", rule="gen-output", old=[key])
    folder = path.rpartition("/")[0]
    draft.put(
        "run.dir", f"{folder}/{name}" if folder else f"runs/{name}", rule="gen-output", old=[key]
    )
    draft.find("gen-output", key)


def build_evaluation(draft: Draft) -> None:
    """Report that the task eval generates and scores in one run."""
    draft.find("evaluation")
