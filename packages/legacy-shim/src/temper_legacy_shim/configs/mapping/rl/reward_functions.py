"""Rewards: the scoring function, and changes of the score."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import is_dapo, response_key

_MANAGERS = ("naive", "dapo", "prime", "batch")
# The oldest key first: the later programs copied it over the newer ones.
MANAGER_KEYS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
KWARGS = ("reward.reward_kwargs", "reward_model.reward_kwargs")


_MODELS = ("reward.reward_model", "reward_model")
_FUNCTIONS = ("reward.custom_reward_function", "custom_reward_function")


def build_reward(draft: Draft) -> None:
    """Set the block ``reward``."""
    model, file = scoring_model(draft), _function_file(draft)
    # Reward managers returned rm_scores without calling a function if the batch had them
    # (NaiveRewardManager.__call__).
    is_scored_by_model = bool(model) and not (file and _was_served(draft))
    if is_scored_by_model:
        _model(draft, model)
    else:
        _function(draft)
    if model and file:
        name = (
            "reward-model.with-function" if _was_served(draft) else "reward-model.before-function"
        )
        draft.find(name, f"{model}.enable", block=model, path=file)
    key, name = _manager_of(draft)
    if name not in _MANAGERS:
        draft.find("reward-manager", key, name=name)
    _overlong(draft, is_scored_by_model=is_scored_by_model)
    # The first call of a model loads it.
    draft.put("reward.timeout_s", 1800.0 if model else 300.0, rule="reward-timeout")


def scoring_model(draft: Draft) -> str:
    """Return the old block of the reward model that scored, or empty."""
    return next((block for block in _MODELS if draft.switch(f"{block}.enable")), "")


def reads_messages(draft: Draft) -> bool:
    """Check if the reward model has a chat template: old workers needed an input_tokenizer."""
    block = scoring_model(draft)
    return bool(block) and (
        _was_served(draft) or draft.old.get("reward_model.model.input_tokenizer") is not None
    )


def _was_served(draft: Draft) -> bool:
    """Check if the reward model was a server, which a function could ask."""
    # Before, workers scored each batch with the model, and the function was not called in training.
    return draft.since("v0.7.1") or draft.switch("reward_model.use_reward_loop")


def _model(draft: Draft, block: str) -> None:
    """Set a reward model with a score head, which scored without a function."""
    key = next(
        (key for key in (f"{block}.model_path", "reward_model.model.path") if draft.text(key)), ""
    )
    if not key:
        draft.find("reward-model.unnamed", f"{block}.enable", block=block)
        return
    old = [f"{block}.enable", key]
    draft.put(
        "reward.function",
        "temper_legacy_shim.old_reward_models:by_model",
        rule="reward-model",
        old=old,
    )
    draft.put(
        "reward.arguments.path", draft.text(key), rule="reward-model", old=[key], verbatim=True
    )
    messages = (draft.text("data.prompt_key") or "prompt") if reads_messages(draft) else None
    draft.put(
        "reward.arguments.messages_key",
        messages,
        rule="reward-model",
        old=["reward_model.model.input_tokenizer"],
    )
    longest = draft.integer("reward_model.max_length")
    if longest is not None:
        draft.put(
            "reward.arguments.max_tokens",
            longest,
            rule="reward-model",
            old=["reward_model.max_length"],
            verbatim=True,
        )
    draft.find("reward-model.unsharded", key, value=draft.text(key))


def _function_file(draft: Draft) -> str:
    """Return the file of the user's own function, or empty."""
    result = (draft.text(f"{block}.path") for block in _FUNCTIONS)
    return next((path for path in result if path and path.lower() not in ("null", "none")), "")


def _function(draft: Draft) -> None:
    for block in _FUNCTIONS:
        path = draft.text(f"{block}.path")
        # Shells pass null as text.
        if path and path.lower() not in ("null", "none"):
            name = draft.text(f"{block}.name") or "compute_score"
            old = [f"{block}.path", f"{block}.name"]
            draft.put(
                "reward.function",
                "temper_legacy_shim.old_rewards:from_file",
                rule="reward-file",
                old=old,
            )
            draft.put(
                "reward.arguments.path",
                path,
                rule="reward-file",
                old=[f"{block}.path"],
                verbatim=True,
            )
            draft.put("reward.arguments.name", name, rule="reward-file", old=[f"{block}.name"])
            kwargs = draft.old.get(f"{block}.reward_kwargs")
            if isinstance(kwargs, dict):
                for key, value in kwargs.items():
                    if not isinstance(value, list | dict):
                        draft.put(
                            f"reward.arguments.{key}",
                            value,
                            rule="reward-file",
                            old=[f"{block}.reward_kwargs.{key}"],
                            verbatim=True,
                        )
            return
    draft.put(
        "reward.function",
        "temper_legacy_shim.old_rewards:by_data_source",
        rule="reward-default",
        old=[],
    )


def _manager_of(draft: Draft) -> tuple[str, str]:
    """Return the key that named the reward manager, and its value."""
    key = next(
        (key for key in MANAGER_KEYS if draft.old.is_set(key)),
        next((key for key in MANAGER_KEYS if draft.text(key)), ""),
    )
    return key, draft.text(key) or "naive"


def _overlong(draft: Draft, *, is_scored_by_model: bool) -> None:
    """Set DAPO's soft penalty of long completions."""
    dapo_blocks = ("reward_model.overlong_buffer", "reward.overlong_buffer")
    manager_blocks = tuple(f"{block}.overlong_buffer_cfg" for block in KWARGS)
    block = next((key for key in manager_blocks + dapo_blocks if draft.switch(f"{key}.enable")), "")
    manager = _manager_of(draft)[1]
    reason = ""
    if is_scored_by_model:
        reason = "a reward model scored"
    elif manager in _MANAGERS and manager != "dapo":
        reason = f"the reward manager was {manager}, and only dapo subtracts it"
    elif block in dapo_blocks and not is_dapo(draft):
        reason = "only the recipes of DAPO read this block"
    elif block in dapo_blocks and _was_served(draft):
        # The loop scored before the recipe's own manager could, and has a block of its own.
        reason = "scores came from the reward loop, which reads reward_kwargs alone"
    if block and not reason:
        _penalty(draft, block)
        return
    for key in manager_blocks + dapo_blocks:
        draft.explain_drop(key, reason or "the penalty is not enabled")
    if block:
        draft.find("overlong.without-effect", f"{block}.enable", reason=reason)


def _penalty(draft: Draft, block: str) -> None:
    """Set the penalty of a block that is enabled."""
    tokens, penalty = draft.integer(f"{block}.len"), draft.number(f"{block}.penalty_factor")
    if tokens is None or tokens < 1:
        return
    if penalty == 0:
        draft.explain_drop(block, "its penalty_factor is 0, so long completions lost nothing")
        return
    draft.put(
        "reward.shaping.overlong.buffer_tokens",
        tokens,
        rule="overlong",
        old=[f"{block}.len", f"{block}.enable"],
    )
    draft.put(
        "reward.shaping.overlong.penalty",
        float(penalty if penalty is not None else 1.0),
        rule="overlong",
        old=[f"{block}.penalty_factor"],
    )
    # The penalty begins at max_resp_len minus the buffer, and here at sampling.max_tokens minus it.
    own = [key for parent in KWARGS if draft.old.has(key := f"{parent}.max_resp_len")]
    # DAPO's recipes gave the manager data.max_response_length.
    for key in own or ["data.max_response_length"]:
        longest, response = draft.integer(key), draft.integer(response_key(draft))
        if longest is not None and response is not None and longest != response:
            draft.find("overlong", key, longest=longest, response=response)
