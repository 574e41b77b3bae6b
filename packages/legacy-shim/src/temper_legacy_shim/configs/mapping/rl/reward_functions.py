"""Rewards: the scoring function, and changes of the score."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import is_dapo, response_key
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact
from temper_legacy_shim.configs.reading.config_values import Plain

# The oldest key first: the later programs copied it over the newer ones.
MANAGER_KEYS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
KWARGS = ("reward.reward_kwargs", "reward_model.reward_kwargs")
_DAPO_BUFFERS = ("reward_model.overlong_buffer", "reward.overlong_buffer")


def build_reward(draft: Draft) -> None:
    """Set the block ``reward``."""
    if is_scored_by_model(draft):
        apply_rows(draft, "reward-model")
    else:
        apply_rows(draft, "reward-function")
        kwargs = draft.old.get(f"{reward_block(draft)}.reward_kwargs")
        for name, value in kwargs.items() if isinstance(kwargs, dict) else ():
            if not isinstance(value, list | dict):
                apply_rows(draft, "reward-argument", argument=name)
    apply_rows(draft, "reward")


@fact
def scoring_model(draft: Draft) -> str:
    """Return the old block of the reward model that scored, or empty."""
    blocks = ("reward.reward_model", "reward_model")
    return next((block for block in blocks if draft.switch(f"{block}.enable")), "")


@fact
def serves_reward_model(draft: Draft) -> bool:
    """Check if the reward model was a server, which a function could ask."""
    # Before, workers scored each batch with the model, and the function was not called in training.
    return draft.since("v0.7.1") or draft.switch("reward_model.use_reward_loop")


@fact
def reward_block(draft: Draft) -> str:
    """Return the block of the user's own reward function, or empty."""
    for block in ("reward.custom_reward_function", "custom_reward_function"):
        # Shells pass null as text.
        if draft.text(f"{block}.path").lower() not in ("", "null", "none"):
            return block
    return ""


def is_scored_by_model(draft: Draft) -> bool:
    # Reward managers returned rm_scores without calling a function if the batch had them
    # (NaiveRewardManager.__call__).
    has_function = bool(reward_block(draft)) and serves_reward_model(draft)
    return bool(scoring_model(draft)) and not has_function


@fact
def reward_model_key(draft: Draft) -> str:
    """Return the key of the reward model's path, or empty."""
    keys = (f"{scoring_model(draft)}.model_path", "reward_model.model.path")
    return next((key for key in keys if draft.text(key)), "")


def reads_messages(draft: Draft) -> bool:
    """Check if the reward model has a chat template: old workers needed an input_tokenizer."""
    return bool(scoring_model(draft)) and (
        serves_reward_model(draft)
        or draft.old.get("reward_model.model.input_tokenizer") is not None
    )


@fact
def reward_messages_key(draft: Draft) -> str | None:
    """Return the column of the conversation for a reward model with a chat template."""
    return (draft.text("data.prompt_key") or "prompt") if reads_messages(draft) else None


@fact
def manager_key(draft: Draft) -> str:
    """Return the key that named the reward manager."""
    set_keys = [key for key in MANAGER_KEYS if draft.old.is_set(key)]
    return next(iter(set_keys or [key for key in MANAGER_KEYS if draft.text(key)]), "")


@fact
def manager(draft: Draft) -> str:
    return draft.text(manager_key(draft)) or "naive"


@fact
def overlong_block(draft: Draft) -> str:
    """Return the block of DAPO's penalty of long completions that is enabled, or empty."""
    blocks = (*(f"{block}.overlong_buffer_cfg" for block in KWARGS), *_DAPO_BUFFERS)
    return next((block for block in blocks if draft.switch(f"{block}.enable")), "")


@fact
def overlong_obstacle(draft: Draft) -> str:
    """Return the reason why no penalty was subtracted, whatever is enabled; else empty."""
    if is_scored_by_model(draft):
        return "a reward model scored"
    if (name := manager(draft)) in ("naive", "prime", "batch"):
        return f"the reward manager was {name}, and only dapo subtracts it"
    if overlong_block(draft) in _DAPO_BUFFERS and not is_dapo(draft):
        return "only the recipes of DAPO read this block"
    if overlong_block(draft) in _DAPO_BUFFERS and serves_reward_model(draft):
        # The loop scored before the recipe's own manager could, and has a block of its own.
        return "scores came from the reward loop, which reads reward_kwargs alone"
    return ""


@fact
def is_penalized(draft: Draft) -> bool:
    """Check if long completions lost reward."""
    block = overlong_block(draft)
    tokens = draft.integer(f"{block}.len") if block and not overlong_obstacle(draft) else None
    return tokens is not None and tokens > 0


@fact
def penalty_limits(draft: Draft) -> str:
    """Return the keys of the length from which the penalty counted, as alternatives."""
    own = [key for parent in KWARGS if draft.old.has(key := f"{parent}.max_resp_len")]
    # DAPO's recipes gave the manager data.max_response_length.
    return f"{{{','.join(own)}}}" if own else "data.max_response_length"


@fact
def response_length(draft: Draft) -> int | None:
    return draft.integer(response_key(draft))


@fact
def reward_path(draft: Draft) -> str:
    return draft.text(f"{reward_block(draft)}.path")


@fact
def reward_columns(draft: Draft) -> list[Plain]:
    """Return the columns that the reward function gets, next to the answer."""
    messages = [draft.text("data.prompt_key") or "prompt"] * reads_messages(draft)
    return [draft.text("data.reward_fn_key") or "data_source", "extra_info", *messages]
