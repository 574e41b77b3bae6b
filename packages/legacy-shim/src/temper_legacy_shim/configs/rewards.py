"""Rewards: who scored a completion, and what happened to the score."""

from temper_legacy_shim.configs.draft import Draft

_MANAGERS = ("naive", "dapo", "prime", "batch")
MANAGER_KEYS = ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
KWARGS = ("reward.reward_kwargs", "reward_model.reward_kwargs")


def build_reward(draft: Draft) -> None:
    """The block ``reward``."""
    _model(draft)
    _function(draft)
    _manager(draft)
    _overlong(draft)
    draft.put("reward.timeout_s", 300.0, rule="reward-timeout")


def _model(draft: Draft) -> None:
    for key in ("reward.reward_model.enable", "reward_model.enable"):
        if draft.switch(key):
            path = draft.text(f"{key.rpartition('.')[0]}.model_path") or draft.text("reward_model.model.path")
            draft.find(
                "person",
                "reward-model",
                f"{key} is true ({path}): a reward model scored the completions, and there is none in this release. Serve it, and write a "
                "reward function that asks it (reward.function=package.module:function).",
            )


def _function(draft: Draft) -> None:
    for block in ("reward.custom_reward_function", "custom_reward_function"):
        path = draft.text(f"{block}.path")
        if path and path.lower() not in ("null", "none"):
            name = draft.text(f"{block}.name") or "compute_score"
            old = [f"{block}.path", f"{block}.name"]
            draft.put("reward.function", "temper_legacy_shim.old_rewards:from_file", rule="reward-file", old=old)
            draft.put("reward.arguments.path", path, rule="reward-file", old=[f"{block}.path"], verbatim=True)
            draft.put("reward.arguments.name", name, rule="reward-file", old=[f"{block}.name"])
            kwargs = draft.old.get(f"{block}.reward_kwargs")
            if isinstance(kwargs, dict):
                for key, value in kwargs.items():
                    if not isinstance(value, list | dict):
                        draft.put(f"reward.arguments.{key}", value, rule="reward-file", old=[f"{block}.reward_kwargs.{key}"], verbatim=True)
            return
    draft.put("reward.function", "temper_legacy_shim.old_rewards:by_data_source", rule="reward-default", old=[])


def _manager(draft: Draft) -> None:
    key = next((key for key in MANAGER_KEYS if draft.old.is_set(key)), next((key for key in MANAGER_KEYS if draft.old.has(key)), ""))
    name = draft.text(key) or "naive"
    if name not in _MANAGERS:
        draft.find(
            "person", "reward-manager", f"{key} is {name}: a reward manager of its own kind; write what it does as a reward function.", key
        )


def _overlong(draft: Draft) -> None:
    """DAPO's soft penalty of long completions."""
    places = [f"{block}.overlong_buffer_cfg" for block in KWARGS] + ["reward_model.overlong_buffer", "reward.overlong_buffer"]
    block = next((place for place in places if draft.switch(f"{place}.enable")), "")
    if not block:
        for place in places:
            draft.say(place, "the penalty is not enabled")
        return
    tokens, penalty = draft.integer(f"{block}.len"), draft.number(f"{block}.penalty_factor")
    if tokens is None or tokens < 1:
        return
    draft.put("reward.shaping.overlong.buffer_tokens", tokens, rule="overlong", old=[f"{block}.len", f"{block}.enable"])
    draft.put(
        "reward.shaping.overlong.penalty", float(penalty if penalty is not None else 1.0), rule="overlong", old=[f"{block}.penalty_factor"]
    )
    for key in (f"{parent}.max_resp_len" for parent in KWARGS):
        longest, response = draft.integer(key), draft.integer("data.max_response_length")
        if longest is not None and response is not None and longest != response:
            draft.find(
                "hazard",
                "overlong",
                f"{key} is {longest}, data.max_response_length {response}: the penalty counts from sampling.max_tokens here, which is the "
                "latter.",
                key,
            )
