"""Sampling of completions: how, by which server, in how many turns."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import evaluates
from temper_legacy_shim.configs.mapping.rl.rl_facts import is_async, is_one_step_off
from temper_legacy_shim.configs.mapping.roles.roles import CLUSTER_KEYS, world_size
from temper_legacy_shim.configs.mapping.rules import apply_rules

BLOCK = "actor_rollout_ref.rollout"


def build_rollout(draft: Draft) -> None:
    """Set the blocks ``sampling``, ``run.eval_sampling`` and ``rollout``, and the loop."""
    _sampling(draft)
    if evaluates(draft):
        _eval_sampling(draft)
    _server(draft)
    _loop(draft)


def _sampling(draft: Draft) -> None:
    apply_rules(draft, "temperature", "top-p", "top-k")
    _lengths(draft, "sampling.max_tokens")
    given = (
        "do_sample is false" if draft.old.get(f"{BLOCK}.do_sample") is False else "temperature is 0"
    )
    if given.startswith("do_sample") or draft.number(f"{BLOCK}.temperature") == 0:
        key = f"{BLOCK}.{given.partition(' ')[0]}"
        draft.find("greedy", key, given=given)
    if draft.switch(f"{BLOCK}.ignore_eos"):
        draft.find("ignore-eos", f"{BLOCK}.ignore_eos")


def _lengths(draft: Draft, key: str) -> None:
    own = f"{BLOCK}.response_length"
    old = (
        own
        if draft.old.is_set(own) and not draft.old.is_set("data.max_response_length")
        else "data.max_response_length"
    )
    draft.copy(key, old, rule="response-length", expected="number")


def _eval_sampling(draft: Draft) -> None:
    block, new = f"{BLOCK}.val_kwargs", "run.eval_sampling"
    samples = draft.switch(f"{block}.do_sample")
    old = [f"{block}.do_sample", f"{block}.temperature"]
    temperature = draft.number(f"{block}.temperature") if samples else 0.0
    if not draft.old.has(f"{block}.temperature"):  # before v0.3 evaluation was greedy
        temperature = 0.0
    draft.put(f"{new}.temperature", float(temperature or 0.0), rule="eval-temperature", old=old)
    if temperature:
        apply_rules(draft, "eval-top-p", "eval-top-k", "eval-completions")
    else:
        for name in ("temperature", "top_p", "top_k"):
            draft.explain_drop(
                f"{block}.{name}",
                "evaluation was greedy (val_kwargs.do_sample is false), so it was not read",
            )
        draft.explain_drop(f"{block}.n", "evaluation was greedy, so all completions were equal")
    _lengths(draft, f"{new}.max_tokens")


def _server(draft: Draft) -> None:
    name = draft.text(f"{BLOCK}.name") or "vllm"
    old = [f"{BLOCK}.name"]
    if name in ("hf",):
        draft.put("rollout", "hf", rule="rollout-name", old=old, group=True)
        return
    if name.startswith("sglang"):
        draft.find("sglang", *old, name=name)
    elif name == "trtllm":
        draft.find("trtllm", *old)
    draft.put("rollout", "vllm", rule="rollout-name", old=old, group=True)
    _refuse_truncated(draft)
    _vllm(draft)


def _refuse_truncated(draft: Draft) -> None:
    """Report a temperature with truncation.

    The server's log-probs are not of the sampled distribution.
    """
    temperature, top_p = draft.number(f"{BLOCK}.temperature"), draft.number(f"{BLOCK}.top_p")
    top_k = draft.integer(f"{BLOCK}.top_k") or 0
    if temperature in (None, 1) or (top_p in (None, 1) and top_k <= 0):
        return
    draft.find(
        "truncated-sampling",
        f"{BLOCK}.temperature",
        f"{BLOCK}.top_p",
        f"{BLOCK}.top_k",
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
    )


def _vllm(draft: Draft) -> None:
    new = "rollout.vllm"
    world, keys = _rollout_world(draft)
    size, pipeline = _server_size(draft, world=world)
    draft.put(
        f"{new}.tensor_parallel_size",
        size,
        rule="rollout-tp",
        old=[f"{BLOCK}.tensor_model_parallel_size"],
    )
    if world is not None and world // (size * pipeline) > 1:
        draft.put(
            "rollout.num_replicas", world // (size * pipeline), rule="rollout-replicas", old=keys
        )
    apply_rules(draft, "rollout-memory", "rollout-batched", "rollout-length", "rollout-sequences")
    apply_rules(
        draft, "rollout-eager", "rollout-chunked", "rollout-prefix", "rollout-dtype", "canary"
    )
    sleeps = (
        draft.switch(f"{BLOCK}.free_cache_engine")
        and not is_async(draft)
        and not is_one_step_off(draft)
    )
    draft.put(
        f"{new}.sleep_level",
        1 if sleeps else 0,
        rule="rollout-sleep",
        old=[f"{BLOCK}.free_cache_engine"],
    )


def _server_size(draft: Draft, *, world: int | None) -> tuple[int, int]:
    """Return GPUs of one server over tensors, and over layers.

    A server that shares GPUs with the trainer's workers gets a single GPU.
    """
    key = f"{BLOCK}.tensor_model_parallel_size"
    size, pipeline = (
        draft.integer(key) or 1,
        draft.integer(f"{BLOCK}.pipeline_model_parallel_size") or 1,
    )
    if size * pipeline == 1 or is_async(draft) or is_one_step_off(draft):
        return size, pipeline
    draft.find("rollout-tp", key, size=size, detail=world or "as many", detail_2=size * pipeline)
    return 1, 1


def _rollout_world(draft: Draft) -> tuple[int | None, list[str]]:
    """Return the sampler's GPUs: separate ones if the trainer uses different GPUs."""
    if draft.old.has("rollout.n_gpus_per_node"):
        nodes, gpus = (
            draft.integer("rollout.nnodes") or 1,
            draft.integer("rollout.n_gpus_per_node") or 0,
        )
        return (nodes * gpus) or None, ["rollout.nnodes", "rollout.n_gpus_per_node"]
    return world_size(draft), list(CLUSTER_KEYS)


def _loop(draft: Draft) -> None:
    if is_one_step_off(draft):
        draft.put("loop", "one_step_off", rule="one-step-off")
    elif is_async(draft):
        draft.put("loop", "async", rule="fully-async")
    if is_one_step_off(draft) or is_async(draft):
        draft.put(
            "rollout.pool", "rollout", rule="rollout-pool", old=["actor_rollout_ref.hybrid_engine"]
        )
