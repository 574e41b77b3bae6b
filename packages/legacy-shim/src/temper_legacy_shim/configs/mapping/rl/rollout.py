"""Sampling of completions: servers, turns, tools, teachers, and sample age."""

import math

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.data_sources import evaluates
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    advantage,
    is_async,
    is_one_step_off,
    reads_top_k,
    response_key,
    uses_servers,
)
from temper_legacy_shim.configs.mapping.roles.roles import CLUSTER_KEYS, world_size
from temper_legacy_shim.configs.mapping.rules import apply_rules

BLOCK = "actor_rollout_ref.rollout"
_PARAMETERS = [
    f"{BLOCK}.{name}"
    for name in (
        *("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"),
        *("presence_penalty", "frequency_penalty", "min_tokens"),
    )
]
"""Attributes of vLLM's SamplingParams, which the samplers until v0.6.1 passed on."""


def build_rollout(draft: Draft) -> None:
    """Set the blocks ``sampling``, ``run.eval_sampling`` and ``rollout``, and the loop."""
    _sampling(draft)
    if evaluates(draft):
        _eval_sampling(draft)
    _server(draft)
    _loop(draft)


def _sampling(draft: Draft) -> None:
    apply_rules(draft, "temperature", "top-p")
    _top_k(draft, BLOCK, rule="top-k", new="sampling.top_k")
    draft.copy(
        "sampling.max_tokens", response_key(draft), rule="response-length", expected="number"
    )
    _prompt_limit(draft)
    _ask_about_greedy_sampling(draft)
    if draft.switch(f"{BLOCK}.ignore_eos"):
        draft.find("ignore-eos", f"{BLOCK}.ignore_eos")
    for key in _PARAMETERS:
        if draft.old.is_set(key) and not (uses_servers(draft) and draft.since("v0.5.0")):
            draft.find("sampling-parameter", key, value=draft.old.get(key))


def _ask_about_greedy_sampling(draft: Draft) -> None:
    """Report training with greedy completions, which needs a decision."""
    # Samplers of vLLM and SGLang take it from a batch's meta_info, which training leaves out.
    reads_do_sample = draft.text(f"{BLOCK}.name") == "hf"
    if not reads_do_sample:
        draft.explain_drop(f"{BLOCK}.do_sample", "in training only the sampler hf read it")
    if draft.switch("trainer.val_only"):
        return
    if reads_do_sample and draft.old.get(f"{BLOCK}.do_sample") is False:
        draft.find("greedy", f"{BLOCK}.do_sample", given="do_sample is false")
    elif draft.number(f"{BLOCK}.temperature") == 0:
        draft.find("greedy", f"{BLOCK}.temperature", given="temperature is 0")


def _top_k(draft: Draft, block: str, *, rule: str, new: str) -> None:
    """Set top_k, or report one that the release's agent loops did not ask for."""
    key = f"{block}.top_k"
    if reads_top_k(draft):
        apply_rules(draft, rule)
        return
    draft.explain_drop(key, f"agent loops of {draft.old.version} did not ask for it")
    if (value := draft.integer(key) or 0) > 0:
        draft.find("top-k.not-read", key, value=value, new=new)


def _prompt_limit(draft: Draft) -> None:
    """Ask about prompts that are longer than the sampler allows."""
    key = f"{BLOCK}.prompt_length"
    if key not in draft.old.origin or draft.old.get(key) == draft.old.get("data.max_prompt_length"):
        return
    limit, longest = draft.integer(key), draft.integer("data.max_prompt_length")
    if limit is not None and longest is not None and limit < longest:
        draft.find("prompt-length-rollout", key, limit=limit, longest=longest)


def _eval_sampling(draft: Draft) -> None:
    block, new = f"{BLOCK}.val_kwargs", "run.eval_sampling"
    # Workers sampled greedily without do_sample, whatever the temperature. Servers never got
    # do_sample: generate_sequences of the agent loops takes val_kwargs.temperature alone.
    is_served = uses_servers(draft)
    samples = is_served or draft.switch(f"{block}.do_sample")
    old = [f"{block}.temperature"] if is_served else [f"{block}.do_sample", f"{block}.temperature"]
    if is_served:
        draft.explain_drop(f"{block}.do_sample", f"servers of {draft.old.version} did not read it")
    temperature = draft.number(f"{block}.temperature") if samples else 0.0
    # The trees before v0.3 have no val_kwargs. _validate of these releases set do_sample to False.
    if not draft.old.has(f"{block}.temperature"):  # before v0.3 evaluation was greedy
        temperature = 0.0
    draft.put(f"{new}.temperature", float(temperature or 0.0), rule="eval-temperature", old=old)
    if temperature:
        apply_rules(draft, "eval-top-p", "eval-completions")
        _top_k(draft, block, rule="eval-top-k", new=f"{new}.top_k")
    else:
        cause = "temperature is 0" if is_served else "do_sample is false"
        for name in ("temperature", "top_p", "top_k"):
            draft.explain_drop(
                f"{block}.{name}",
                f"evaluation was greedy (val_kwargs.{cause}), so it had no effect",
            )
        draft.explain_drop(f"{block}.n", "evaluation was greedy, so all completions were equal")
    draft.copy(f"{new}.max_tokens", response_key(draft), rule="response-length", expected="number")


def _server(draft: Draft) -> None:
    name = draft.text(f"{BLOCK}.name") or "vllm"
    old = [f"{BLOCK}.name"]
    if name in ("hf",):
        draft.put("rollout", "hf", rule="rollout-name", old=old, group=True)
        return
    if name.startswith("sglang"):
        draft.find("sglang", *old, name=name)
    elif name not in ("vllm", "???"):
        draft.find("other-sampler", *old, name=name)
    draft.put("rollout", "vllm", rule="rollout-name", old=old, group=True)
    _refuse_truncated(draft)
    _vllm(draft)


def _refuse_truncated(draft: Draft) -> None:
    """Report truncation: the server's log-probs are not of the sampled distribution."""
    temperature, top_p = draft.number(f"{BLOCK}.temperature"), draft.number(f"{BLOCK}.top_p")
    top_k = (draft.integer(f"{BLOCK}.top_k") or 0) if reads_top_k(draft) else 0
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
    # The old workers formed a server of each tensor_model_parallel_size ranks.
    if world is not None and world // (size * pipeline) > 1:
        draft.put(
            "rollout.num_replicas", world // (size * pipeline), rule="rollout-replicas", old=keys
        )
    apply_rules(draft, "rollout-memory", "rollout-batched", "rollout-length", "rollout-sequences")
    apply_rules(
        draft, "rollout-eager", "rollout-chunked", "rollout-prefix", "rollout-dtype", "canary"
    )
    # Servers that share GPUs with training free their memory for it (free_cache_engine). Those with
    # GPUs of their own keep it.
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

    A server that shares GPUs with the trainer's workers divides only tensors, and gets a single GPU
    if the GPUs of a host are no multiple of its own.
    """
    key = f"{BLOCK}.tensor_model_parallel_size"
    size, pipeline = (
        draft.integer(key) or 1,
        draft.integer(f"{BLOCK}.pipeline_model_parallel_size") or 1,
    )
    # Separate sampler GPUs keep servers of any size.
    if size * pipeline == 1 or is_async(draft) or is_one_step_off(draft):
        return size, pipeline
    per_host = (
        draft.cluster.gpus_per_node
        if draft.cluster is not None
        else draft.integer("trainer.n_gpus_per_node")
    )
    total = size * pipeline
    if world is None or per_host is None or per_host % total == 0:
        return total, 1
    draft.find("rollout-tp", key, size=size, detail=per_host, detail_2=total)
    return 1, 1


def _rollout_world(draft: Draft) -> tuple[int | None, list[str]]:
    """Return the sampler's GPUs: separate ones if the trainer uses different GPUs."""
    # Asynchronous entries state the sampler's GPUs in a block of their own.
    # rollout.nnodes and rollout.n_gpus_per_node of the fully asynchronous and one-step-off
    # programs.
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


TURNS = "actor_rollout_ref.rollout.multi_turn"
_TEACHERS = "distillation.teacher_models"
_LOSS = "distillation.distillation_loss"


_OWN_CODE = (
    f"{TURNS}.interaction_config_path",
    f"{TURNS}.completion_callback",
    f"{TURNS}.function_tool_path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
)
_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
_LOOPS = (
    "single_turn_agent",
    "tool_agent",
    "partial_single_turn_agent",
    "async_partial_tool_agent",
)
"""Agent loops that the releases registered; others are the user's code."""
_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators without a critic whose advantages are normalized over the tokens of the mask."""
_HERMES = ("", "hermes", "chatml")
"""Words for calls written as <tool_call>{...}</tool_call>; chatml was v0.4.0's."""


def build_turns(draft: Draft) -> None:
    """Set an environment for tools, and report a question for other code that answers."""
    _unread_limit(draft)
    tools, own = (
        draft.text(f"{TURNS}.tool_config_path"),
        [key for key in _OWN_CODE if draft.text(key)],
    )
    # A loop of the user's code may answer in any way.
    own += [_LOOP] * ((draft.text(_LOOP) or _LOOPS[0]) not in _LOOPS)
    is_named = "multiturn" in draft.config_name or "multi_turn" in draft.config_name
    form = draft.text(f"{TURNS}.format")
    if own or (tools and form not in _HERMES) or (is_named and not tools):
        _ask(draft, tools=tools, own=own, form=form)
    elif tools:
        _tools(draft, tools)
    else:
        if draft.switch(f"{TURNS}.enable"):
            draft.find("multi-turn.no-tools", f"{TURNS}.enable")
        draft.explain_drop(TURNS, "one completion for each prompt: nothing answers it")
    if own or tools:
        _check_advantages(draft)
    draft.explain_drop(
        _LOOP, "with tools the loop is an environment, and without it is one completion"
    )
    draft.explain_drop(
        "actor_rollout_ref.rollout.agent",
        "how many processes ran the rollouts; servers are asynchronous anyway",
    )


def _check_advantages(draft: Draft) -> None:
    """Report estimators in which the tokens between completions had a part."""
    name = advantage(draft)
    if not draft.since("v0.5.0") and name in ("gae", *_WHITENED):
        how = "as if the model had written what answered it"
    elif name == _WHITENED[0] and draft.since("v0.5.0") and not draft.since("v0.9.0"):
        how = "with a return of 0 for every completion but the last of a rollout"
    else:
        return
    draft.find("multi-turn.advantages", "algorithm.adv_estimator", name=name, how=how)


def _ask(draft: Draft, *, tools: str, own: list[str], form: str) -> None:
    parts = [f"tools of {tools}"] * bool(tools) + [f"{key}={draft.text(key)}" for key in own]
    parts += [f"calls in the form {form}"] * (bool(tools) and form not in _HERMES)
    what = "; ".join(parts) or f"{draft.config_name} says so, and lies in a file that was not given"
    turns = _num_turns(draft)
    draft.find(
        "multi-turn.own-code",
        what=what,
        detail=f" and environment.max_turns={turns}" if turns else "",
    )
    draft.explain_drop(TURNS, "turns and tools become an environment, which is asked about once")


def _tools(draft: Draft, path: str) -> None:
    tools, length = f"{TURNS}.tool_config_path", draft.integer(response_key(draft))
    draft.put(
        "environment.name",
        "temper_legacy_shim.old_tools:HermesTools",
        rule="multi-turn",
        old=[tools, f"{TURNS}.enable"],
    )
    draft.put("environment.arguments.path", path, rule="multi-turn", old=[tools], verbatim=True)
    draft.put("data.tools_path", path, rule="multi-turn", old=[tools], verbatim=True)
    draft.copy(
        "environment.arguments.max_characters",
        f"{TURNS}.max_tool_response_length",
        rule="multi-turn",
        expected="number",
    )
    draft.copy(
        "environment.arguments.cut", f"{TURNS}.tool_response_truncate_side", rule="multi-turn"
    )
    draft.put("environment.call_start", "<tool_call>", rule="multi-turn", old=[f"{TURNS}.format"])
    draft.put("environment.call_end", "</tool_call>", rule="multi-turn", old=[f"{TURNS}.format"])
    limits = _limits(draft)
    # Without a limit the tokens of the rollout were one; a call and its answer take sixteen at
    # least.
    draft.put(
        "environment.max_turns",
        _num_turns(draft) or max(1, (length or 1024) // 16),
        rule="multi-turn",
        old=limits,
    )
    if length is not None:
        draft.put("environment.max_tokens", length, rule="multi-turn", old=[response_key(draft)])
    draft.put("environment.tool_timeout_s", 300.0, rule="multi-turn")
    parallel = draft.integer(f"{TURNS}.max_parallel_calls") or 1
    also = (
        f", and the other {parallel - 1} of max_parallel_calls wait for turns of their own"
        if parallel > 1
        else ""
    )
    draft.find("multi-turn.tools", tools, path=path, also=also)
    draft.explain_drop(
        TURNS, "an environment has no such choice: it is called as before in any case"
    )


def _num_turns(draft: Draft) -> int:
    """Return the maximum number of completions of a rollout; 0 for no limit."""
    # sglang_rollout counts completions by max_turns in v0.4.0 and by max_assistant_turns since
    # v0.4.1. Each user turn is followed by one more completion.
    counts = {key.rpartition(".")[2]: draft.integer(key) or 0 for key in _limits(draft)}
    others = counts.get("max_user_turns", 0)
    result = [
        counts.get("max_assistant_turns", 0),
        others + 1 if others > 0 else 0,
        counts.get("max_turns", 0),
    ]
    return min((count for count in result if count > 0), default=0)


def _limits(draft: Draft) -> list[str]:
    """Return the keys that limit turns in this release: it reads no other, whatever + put there."""
    return [
        key
        for name in ("max_assistant_turns", "max_user_turns", "max_turns")
        if (key := f"{TURNS}.{name}") in draft.old.defaults
    ]


def _unread_limit(draft: Draft) -> None:
    key = f"{TURNS}.max_turns"
    if key in _limits(draft) or not draft.old.is_set(key):
        return
    reason = (
        f"{draft.old.version} does not read it: v0.4.0 alone did, and max_assistant_turns and "
        "max_user_turns came after it"
    )
    draft.find("max-turns", key, value=draft.old.get(key), reason=reason)
    draft.explain_drop(key, reason)


def build_staleness(draft: Draft) -> None:
    """Set a bound on sample age from the fraction of stale samples."""
    if not is_async(draft):
        return
    fraction = draft.number("async_training.staleness_threshold")
    # FullyAsyncRollouter let (1 + staleness_threshold) steps of prompts be in flight, a fraction of
    # a step. Temper counts weight versions, which are integers.
    bound = max(1, math.ceil(fraction or 0))
    if fraction is not None:
        draft.put(
            "asynchrony.max_staleness",
            bound,
            rule="staleness",
            old=["async_training.staleness_threshold"],
        )
    partial = draft.switch("async_training.partial_rollout")
    draft.put(
        "asynchrony.partial_rollouts",
        partial,
        rule="staleness",
        old=["async_training.partial_rollout"],
    )
    draft.find("staleness", "async_training.staleness_threshold", fraction=fraction, bound=bound)
    is_first = not draft.since("v0.7.1")
    if is_first and not draft.switch("async_training.use_rollout_log_probs"):
        draft.find(
            "async-proximal",
            "async_training.use_rollout_log_probs",
            detail=max(1, draft.integer("async_training.trigger_parameter_sync_step") or 1),
        )


def build_teachers(draft: Draft) -> None:
    """Set on-policy distillation of v0.8.0 and later."""
    if not draft.switch("distillation.enabled"):
        draft.explain_drop("distillation", "distillation is not enabled")
        return
    # Keys below teacher_models are names that the user chose.
    names = {
        key.removeprefix(f"{_TEACHERS}.").partition(".")[0] for key in draft.old.below(_TEACHERS)
    }
    taught = [name for name in sorted(names) if draft.text(f"{_TEACHERS}.{name}.model_path")]
    if not taught:
        draft.find("distillation.no-model", "distillation.enabled")
    for name in taught:
        _teacher(draft, name)
    if len(taught) > 1:
        draft.copy("data.train.route_key", "distillation.teacher_key", rule="distillation")
    _distillation_loss(draft)
    draft.put(
        "task",
        "rl" if draft.switch(f"{_LOSS}.use_task_rewards") else "distill",
        rule="distillation",
        old=[f"{_LOSS}.use_task_rewards", "distillation.enabled"],
    )


def _teacher(draft: Draft, name: str) -> None:
    old, new = f"{_TEACHERS}.{name}", f"teachers.{name}"
    draft.copy(f"{new}.engine.model.path", f"{old}.model_path", rule="distillation")
    route = draft.text(f"{old}.key")
    if route:
        draft.put(f"{new}.route", route, rule="distillation", old=[f"{old}.key"], verbatim=True)
    replicas = draft.integer(f"{old}.num_replicas")
    if replicas is not None and replicas > 1:
        draft.put(
            f"{new}.num_replicas",
            replicas,
            rule="distillation",
            old=[f"{old}.num_replicas"],
            verbatim=True,
        )
    draft.put(f"{new}.backend", "vllm", rule="distillation", old=[f"{old}.inference.name"])


def _distillation_loss(draft: Draft) -> None:
    mode = draft.text(f"{_LOSS}.loss_mode") or "k3"
    is_reward = draft.switch(f"{_LOSS}.use_policy_gradient")
    key = f"{_LOSS}.loss_mode"
    if mode in ("k1", "kl", "k2", "mse", "k3", "low_var_kl"):
        estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(mode, mode)
        name = "reverse_kl_reward" if is_reward else "reverse_kl"
        draft.put(
            "distillation.objective.name",
            name,
            rule="distillation",
            old=[key, f"{_LOSS}.use_policy_gradient"],
        )
        # The gradient of log(p/q) at samples of p is 0 in expectation.
        if estimator == "k1" and not is_reward:
            draft.find("distillation.zero-gradient", key, mode=mode)
        else:
            draft.put(
                "distillation.objective.kl_estimator", estimator, rule="distillation", old=[key]
            )
    elif mode.startswith("forward_kl"):
        draft.put("distillation.objective.name", "forward_kl", rule="distillation", old=[key])
        draft.copy(
            "distillation.objective.top_k", f"{_LOSS}.topk", rule="distillation", expected="number"
        )
    else:
        draft.find("distillation.unknown-loss", key, mode=mode)
    coef = draft.number(f"{_LOSS}.distillation_loss_coef")
    if coef is not None:
        draft.put(
            "distillation.coef",
            float(coef),
            rule="distillation",
            old=[f"{_LOSS}.distillation_loss_coef"],
        )
    clamp = draft.number(f"{_LOSS}.loss_max_clamp")
    if clamp is not None and clamp > 0:
        draft.put(
            "distillation.clamp",
            float(clamp),
            rule="distillation",
            old=[f"{_LOSS}.loss_max_clamp"],
            verbatim=True,
        )
