"""Sampling of completions: servers, turns, tools, teachers, and sample age."""

import math

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    evaluates,
    has_sampler_gpus,
    reads_top_k,
    response_key,
    uses_servers,
)
from temper_legacy_shim.configs.mapping.roles.roles import CLUSTER_KEYS, world_size
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact

BLOCK = "actor_rollout_ref.rollout"


def build_rollout(draft: Draft) -> None:
    """Set the blocks ``sampling``, ``run.eval_sampling`` and ``rollout``, and the loop."""
    apply_rows(draft, "sampling")
    if evaluates(draft):
        apply_rows(draft, "eval-sampling")
    apply_rows(draft, "sampler")
    if draft.text(f"{BLOCK}.name") != "hf":
        _set_servers(draft)
    apply_rows(draft, "loop")


@fact
def limits_prompts(draft: Draft) -> bool:
    """Check if the sampler allowed shorter prompts than the data."""
    key = f"{BLOCK}.prompt_length"
    if key not in draft.old.origin or draft.old.get(key) == draft.old.get("data.max_prompt_length"):
        return False
    limit, longest = draft.integer(key), draft.integer("data.max_prompt_length")
    return limit is not None and longest is not None and limit < longest


@fact
def is_greedy_by_switch(draft: Draft) -> bool:
    """Check if a sampler that reads do_sample was told not to sample."""
    return draft.text(f"{BLOCK}.name") == "hf" and draft.old.get(f"{BLOCK}.do_sample") is False


@fact
def passes_parameters_on(draft: Draft) -> bool:
    """Check if the sampler took any attribute of SamplingParams that it found in its block."""
    return not (uses_servers(draft) and draft.since("v0.5.0"))


@fact
def eval_temperature(draft: Draft) -> float:
    """Return the temperature of evaluation; 0 if it was greedy."""
    block = f"{BLOCK}.val_kwargs"
    # Workers sampled greedily without do_sample, whatever the temperature. The trees before v0.3
    # have no val_kwargs: _validate of these releases set do_sample to False.
    samples = uses_servers(draft) or draft.switch(f"{block}.do_sample")
    if not samples or not draft.old.has(f"{block}.temperature"):
        return 0.0
    return float(draft.number(f"{block}.temperature") or 0.0)


@fact
def is_sglang(draft: Draft) -> bool:
    return draft.text(f"{BLOCK}.name").startswith("sglang")


@fact
def top_k(draft: Draft) -> int:
    """Return the top_k that had an effect; 0 for all tokens, where -1 was the old word."""
    return (draft.integer(f"{BLOCK}.top_k") or 0) if reads_top_k(draft) else 0


@fact
def truncates(draft: Draft) -> bool:
    """Check if completions were drawn at another temperature from the most likely tokens alone."""
    temperature, top_p = draft.number(f"{BLOCK}.temperature"), draft.number(f"{BLOCK}.top_p")
    return temperature not in (None, 1) and (top_p not in (None, 1) or top_k(draft) > 0)


def _set_servers(draft: Draft) -> None:
    world, keys = _rollout_world(draft)
    size, pipeline = _server_size(draft, world=world)
    # The old workers formed a server of each tensor_model_parallel_size ranks.
    servers = 0 if world is None else world // (size * pipeline)
    num_replicas = servers if servers > 1 else 0
    world_keys = " and ".join(keys)
    apply_rows(
        draft, "vllm", tensor_parallel=size, num_replicas=num_replicas, world_keys=world_keys
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
    if size * pipeline == 1 or has_sampler_gpus(draft):
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
    # The fully asynchronous and one-step-off programs state them in a block of their own.
    if draft.old.has("rollout.n_gpus_per_node"):
        nodes, gpus = (
            draft.integer("rollout.nnodes") or 1,
            draft.integer("rollout.n_gpus_per_node") or 0,
        )
        return (nodes * gpus) or None, ["rollout.nnodes", "rollout.n_gpus_per_node"]
    return world_size(draft), list(CLUSTER_KEYS)


TURNS = "actor_rollout_ref.rollout.multi_turn"
_TEACHERS = "distillation.teacher_models"
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
_HERMES = ("", "hermes", "chatml")
"""Words for calls written as <tool_call>{...}</tool_call>; chatml was v0.4.0's."""


def build_turns(draft: Draft) -> None:
    """Set an environment for tools, and report a question for other code that answers."""
    apply_rows(draft, "turns")
    tools = draft.text(f"{TURNS}.tool_config_path")
    own = [key for key in _OWN_CODE if draft.text(key)]
    # A loop of the user's code may answer in any way.
    own += [_LOOP] * ((draft.text(_LOOP) or _LOOPS[0]) not in _LOOPS)
    is_named = "multiturn" in draft.config_name or "multi_turn" in draft.config_name
    form = draft.text(f"{TURNS}.format")
    if own or (tools and form not in _HERMES) or (is_named and not tools):
        _ask(draft, tools=tools, own=own, form=form)
    elif tools:
        _tools(draft, tools)
    else:
        apply_rows(draft, "no-turns")
    if own or tools:
        apply_rows(draft, "turn-advantages")
    apply_rows(draft, "agent-loops")


def _ask(draft: Draft, *, tools: str, own: list[str], form: str) -> None:
    parts = [f"tools of {tools}"] * bool(tools) + [f"{key}={draft.text(key)}" for key in own]
    parts += [f"calls in the form {form}"] * (bool(tools) and form not in _HERMES)
    what = "; ".join(parts) or f"{draft.config_name} says so, and lies in a file that was not given"
    turns = _num_turns(draft)
    detail = f" and environment.max_turns={turns}" if turns else ""
    apply_rows(draft, "own-turns", what=what, detail=detail)


def _tools(draft: Draft, path: str) -> None:
    # Without a limit the tokens of the rollout were one; a call and its answer take sixteen at
    # least.
    length = draft.integer(response_key(draft)) or 1024
    parallel = draft.integer(f"{TURNS}.max_parallel_calls") or 1
    also = (
        f", and the other {parallel - 1} of max_parallel_calls wait for turns of their own"
        if parallel > 1
        else ""
    )
    apply_rows(
        draft,
        "tools",
        max_turns=_num_turns(draft) or max(1, length // 16),
        limits=" and ".join(_limits(draft)),
        path=path,
        also=also,
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


@fact
def reads_max_turns(draft: Draft) -> bool:
    return f"{TURNS}.max_turns" in _limits(draft)


@fact
def max_staleness(draft: Draft) -> int:
    # FullyAsyncRollouter let (1 + staleness_threshold) steps of prompts be in flight, a fraction of
    # a step. Temper counts weight versions, which are integers.
    return max(1, math.ceil(draft.number("async_training.staleness_threshold") or 0))


@fact
def trainer_calls(draft: Draft) -> int:
    """Return the calls of the asynchronous trainer between two weight syncs."""
    return max(1, draft.integer("async_training.trigger_parameter_sync_step") or 1)


def build_teachers(draft: Draft) -> None:
    """Set on-policy distillation of v0.8.0 and later."""
    if not draft.switch("distillation.enabled"):
        apply_rows(draft, "no-teachers")
        return
    # Keys below teacher_models are names that the user chose.
    names = {
        key.removeprefix(f"{_TEACHERS}.").partition(".")[0] for key in draft.old.below(_TEACHERS)
    }
    taught = [name for name in sorted(names) if draft.text(f"{_TEACHERS}.{name}.model_path")]
    for name in taught:
        apply_rows(draft, "teacher", teacher=name)
    apply_rows(draft, "distillation", num_teachers=len(taught), has_routes=len(taught) > 1)


@fact
def distillation_loss(draft: Draft) -> str:
    """Return the loss; forward_kl_topk is forward_kl here, with top_k."""
    mode = draft.text("distillation.distillation_loss.loss_mode") or "k3"
    return "forward_kl" if mode.startswith("forward_kl") else mode
