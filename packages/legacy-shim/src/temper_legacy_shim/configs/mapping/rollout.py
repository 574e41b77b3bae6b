"""Sampling of completions: how, by which server, in how many turns."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import evaluates
from temper_legacy_shim.configs.mapping.rl_facts import is_async, is_one_step_off
from temper_legacy_shim.configs.mapping.roles import CLUSTER_KEYS, world_size

BLOCK = "actor_rollout_ref.rollout"


def build_rollout(draft: Draft) -> None:
    """The blocks ``sampling``, ``run.eval_sampling`` and ``rollout``, and the loop."""
    _sampling(draft)
    if evaluates(draft):
        _eval_sampling(draft)
    _server(draft)
    _loop(draft)


def _sampling(draft: Draft) -> None:
    draft.copy("sampling.temperature", f"{BLOCK}.temperature", rule="temperature", expected="number")
    draft.copy("sampling.top_p", f"{BLOCK}.top_p", rule="top-p", expected="number")
    top_k = draft.integer(f"{BLOCK}.top_k")
    draft.put("sampling.top_k", max(0, top_k or 0), rule="top-k", old=[f"{BLOCK}.top_k"])
    _lengths(draft, "sampling.max_tokens")
    said = "do_sample is false" if draft.old.get(f"{BLOCK}.do_sample") is False else "temperature is 0"
    if said.startswith("do_sample") or draft.number(f"{BLOCK}.temperature") == 0:
        key = f"{BLOCK}.{said.partition(' ')[0]}"
        draft.find("person", "greedy", f"{BLOCK}.{said}: training from greedy completions learns nothing from groups.", key)
    if draft.switch(f"{BLOCK}.ignore_eos"):
        draft.find(
            "person",
            "ignore-eos",
            f"{BLOCK}.ignore_eos is true: here a completion ends with its end token. Turn it off.",
            f"{BLOCK}.ignore_eos",
        )


def _lengths(draft: Draft, key: str) -> None:
    own = f"{BLOCK}.response_length"
    old = own if draft.old.is_set(own) and not draft.old.is_set("data.max_response_length") else "data.max_response_length"
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
        draft.copy(f"{new}.top_p", f"{block}.top_p", rule="eval-top-p", expected="number")
        draft.put(f"{new}.top_k", max(0, draft.integer(f"{block}.top_k") or 0), rule="eval-top-k", old=[f"{block}.top_k"])
    else:
        for name in ("temperature", "top_p", "top_k"):
            draft.say(f"{block}.{name}", "evaluation was greedy (val_kwargs.do_sample is false), so it was not read")
    _lengths(draft, f"{new}.max_tokens")
    count = draft.integer(f"{block}.n")
    if count is not None and count > 1:
        draft.find(
            "hazard",
            "eval-completions",
            f"{block}.n is {count}: the old trainer averaged over {count} completions of each held-out prompt; here each has one, so the "
            "score scatters more. Training is untouched.",
            f"{block}.n",
        )


def _server(draft: Draft) -> None:
    name = draft.text(f"{BLOCK}.name") or "vllm"
    old = [f"{BLOCK}.name"]
    if name in ("hf",):
        draft.put("rollout", "hf", rule="rollout-name", old=old, group=True)
        return
    if name.startswith("sglang"):
        draft.find(
            "hazard",
            "sglang",
            f"{BLOCK}.name is {name}: completions come from vLLM here, which draws other tokens from the same weights.",
            *old,
        )
    elif name == "trtllm":
        draft.find(
            "hazard",
            "trtllm",
            f"{BLOCK}.name is trtllm: completions come from vLLM here, which draws other tokens from the same weights.",
            *old,
        )
    draft.put("rollout", "vllm", rule="rollout-name", old=old, group=True)
    _refuse_truncated(draft)
    _vllm(draft)


def _refuse_truncated(draft: Draft) -> None:
    """A temperature together with truncation: the server's log-probs are not those of the distribution that was drawn from."""
    temperature, top_p = draft.number(f"{BLOCK}.temperature"), draft.number(f"{BLOCK}.top_p")
    top_k = draft.integer(f"{BLOCK}.top_k") or 0
    if temperature in (None, 1) or (top_p in (None, 1) and top_k <= 0):
        return
    draft.find(
        "person",
        "truncated-sampling",
        f"{BLOCK}.temperature is {temperature} together with top_p {top_p} and top_k {top_k}: vLLM's log-probs are then not those of what "
        "was drawn, which the old trainer did not look at. Take temperature 1, or top_p 1 and top_k -1, or rollout=hf.",
        f"{BLOCK}.temperature",
        f"{BLOCK}.top_p",
        f"{BLOCK}.top_k",
    )


def _vllm(draft: Draft) -> None:
    new = "rollout.vllm"
    world, keys = _rollout_world(draft)
    size, pipeline = _server_size(draft, world=world)
    draft.put(f"{new}.tensor_parallel_size", size, rule="rollout-tp", old=[f"{BLOCK}.tensor_model_parallel_size"])
    if world is not None and world // (size * pipeline) > 1:
        draft.put("rollout.num_replicas", world // (size * pipeline), rule="rollout-replicas", old=keys)
    draft.copy(f"{new}.gpu_memory_utilization", f"{BLOCK}.gpu_memory_utilization", rule="rollout-memory", expected="number")
    draft.copy(f"{new}.max_num_batched_tokens", f"{BLOCK}.max_num_batched_tokens", rule="rollout-batched", expected="number")
    draft.copy(f"{new}.max_model_len", f"{BLOCK}.max_model_len", rule="rollout-length", expected="number")
    draft.copy("rollout.max_concurrent", f"{BLOCK}.max_num_seqs", rule="rollout-sequences", expected="number")
    draft.copy(f"{new}.enforce_eager", f"{BLOCK}.enforce_eager", rule="rollout-eager")
    draft.copy(f"{new}.enable_chunked_prefill", f"{BLOCK}.enable_chunked_prefill", rule="rollout-chunked")
    draft.copy(f"{new}.enable_prefix_caching", f"{BLOCK}.enable_prefix_caching", rule="rollout-prefix")
    dtype = draft.text(f"{BLOCK}.dtype") or "bfloat16"
    ours = "fp32" if dtype in ("float32", "fp32", "float") else "bf16"
    draft.put("rollout.dtype", ours, rule="rollout-dtype", old=[f"{BLOCK}.dtype"])
    draft.put("rollout.canary_tolerance", 0.2, rule="canary")
    sleeps = draft.switch(f"{BLOCK}.free_cache_engine") and not is_async(draft) and not is_one_step_off(draft)
    draft.put(f"{new}.sleep_level", 1 if sleeps else 0, rule="rollout-sleep", old=[f"{BLOCK}.free_cache_engine"])


def _server_size(draft: Draft, *, world: int | None) -> tuple[int, int]:
    """GPUs of one server over tensors, and over layers; one GPU where it shares them with the trainer's workers."""
    key = f"{BLOCK}.tensor_model_parallel_size"
    size, pipeline = draft.integer(key) or 1, draft.integer(f"{BLOCK}.pipeline_model_parallel_size") or 1
    if size * pipeline == 1 or is_async(draft) or is_one_step_off(draft):
        return size, pipeline
    draft.find(
        "hazard",
        "rollout-tp",
        f"{key} is {size}, on the GPUs that train: here a server that shares GPUs with workers has one, so {world or 'as many'} servers of "
        "one GPU each sample, which changes no probability. Where the model does not fit beside the actor, give servers GPUs of their own: "
        f"rollout.pool=rollout rollout.vllm.tensor_parallel_size={size * pipeline}, and rollout.num_replicas.",
        key,
    )
    return 1, 1


def _rollout_world(draft: Draft) -> tuple[int | None, list[str]]:
    """GPUs of the sampler: its own where the trainer has others."""
    if draft.old.has("rollout.n_gpus_per_node"):
        nodes, gpus = draft.integer("rollout.nnodes") or 1, draft.integer("rollout.n_gpus_per_node") or 0
        return (nodes * gpus) or None, ["rollout.nnodes", "rollout.n_gpus_per_node"]
    return world_size(draft), list(CLUSTER_KEYS)


def _loop(draft: Draft) -> None:
    if is_one_step_off(draft):
        draft.put("loop", "one_step_off", rule="one-step-off")
    elif is_async(draft):
        draft.put("loop", "async", rule="fully-async")
    if is_one_step_off(draft) or is_async(draft):
        draft.put("rollout.pool", "rollout", rule="rollout-pool", old=["actor_rollout_ref.hybrid_engine"])
