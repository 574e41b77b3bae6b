"""Workers of the old run, and differences of their numerics from those of engines."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.batches import ACTOR_MINI
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    completions_per_prompt,
    needs_critic,
    response_key,
    updates_per_step,
)
from temper_legacy_shim.configs.mapping.roles.roles import ACTOR, data_parallel, is_megatron
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact
from temper_legacy_shim.configs.reading.config_values import Plain

SWITCH = "trainer.use_legacy_worker_impl"


def build_numerics(draft: Draft) -> None:
    """Pin the old workers, or report the numeric differences without them."""
    if apply_rows(draft, "worker-switch", numerics=draft.numerics):
        _differences(draft)


@fact
def has_engines(draft: Draft) -> bool:
    """Check if the old run trained the actor on engines, not on the old workers."""
    return draft.since("v0.8.0") or (draft.since("v0.7.0") and worker_word(draft) == "disable")


@fact
def worker_word(draft: Draft) -> str:
    """Return the word of the switch between old workers and engines."""
    words: dict[Plain, str] = {True: "enable", False: "disable", None: "auto"}
    given = draft.old.get(SWITCH)
    return "None" if isinstance(given, list | dict) else words.get(given, str(given))


@fact
def worker_choice(draft: Draft) -> str:
    """Return the switch as the release took it."""
    written = "written" if draft.old.is_set(SWITCH) else "the default"
    return f"{SWITCH}={worker_word(draft)} ({written})"


def _differences(draft: Draft) -> None:
    """Report each numeric habit of the old workers that this configuration would have shown."""
    ranks, mini = data_parallel(draft, ACTOR), draft.integer(ACTOR_MINI)
    if ranks is None or mini is None:
        return
    n = completions_per_prompt(draft)
    own = max(1, mini * n // ranks)
    parts, how = _parts(draft, own=own)
    if parts * ranks > 1:
        mode = draft.text("actor_rollout_ref.actor.loss_agg_mode") or "token-mean"
        roles = "actor's and the critic's losses" if needs_critic(draft) else "actor's loss"
        weighing = (
            "a token in a part with half as many tokens weighed twice as much"
            if mode == "token-mean"
            else f"{mode} was taken of each part"
        )
        draft.find(
            "micro-batch-normalization",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            roles=roles,
            verb="were" if needs_critic(draft) else "was",
            detail=mini * n,
            how=how,
            ranks=ranks,
            detail_2=parts * ranks,
            weighing=weighing,
        )
    if sentence := _logged(draft, parts=parts):
        draft.find("summed-metrics", sentence=sentence)
    apply_rows(draft, "divisor")


_LOGGED = (("v0.7.0", "summed"), ("v0.6.0", "scaled"), ("v0.2", "averaged"))
"""Logging of losses by FSDP's workers, from the newest release on; Megatron's always averaged."""


def _logged(draft: Draft, *, parts: int) -> str:
    """Describe how the release's logged losses compare with those here; empty if they are equal."""
    how = (
        "averaged"
        if is_megatron(draft)
        else next(word for since, word in _LOGGED if draft.since(since))
    )
    names = (
        "actor/pg_loss, actor/kl_loss and critic/vf_loss"
        if needs_critic(draft)
        else "actor/pg_loss and actor/kl_loss"
    )
    updates = updates_per_step(draft)
    if (updates if how == "summed" else parts) == 1:
        return ""
    meaning = {
        "averaged": (
            f"were averaged over the {parts} micro-batches of each update, and compare as they are"
        ),
        "scaled": (
            "were scaled by each micro-batch's share of the update and then averaged again: "
            f"multiply them by {parts}, the actor's micro-batches of an update"
        ),
        "summed": f"were summed over the {updates} updates of a step: divide them by {updates}",
    }[how]
    return (
        f"{names} in the log of {draft.old.version} {meaning}. Here a loss is that of the whole "
        "update, and its mean over a step's updates."
    )


@fact
def divisor(draft: Draft) -> str:
    """Describe the divisor of seq-mean-token-sum-norm; empty for other modes."""
    width = draft.settings.get("algorithm.horizon")
    if width is None:
        return ""
    if has_engines(draft) and draft.old.get(f"{ACTOR.block}.loss_scale_factor") is not None:
        return f"loss_scale_factor, {width.value} (#4360)"
    return (
        f"the width of the padded completions, which {draft.old.version} padded to "
        f"{response_key(draft)}, {width.value}"
    )


@fact
def summed_part(draft: Draft) -> str:
    """Return the part of a batch whose completions were summed."""
    return "rank's mini-batch" if has_engines(draft) else "micro-batch"


def _parts(draft: Draft, *, own: int) -> tuple[int, str]:
    """Return an update's micro-batches on one rank, at most, and how to say so."""
    if draft.switch("actor_rollout_ref.actor.use_dynamic_bsz"):
        budget = draft.integer("actor_rollout_ref.actor.ppo_max_token_len_per_gpu") or 1
        longest = (draft.integer("data.max_prompt_length") or 0) + (
            draft.integer(response_key(draft)) or 0
        )
        # Dynamic micro-batches depend on the data: this many are needed if all samples are longest.
        most = max(1, -(-own * longest // max(1, budget)))
        return most, f"up to {most} micro-batches of {budget} tokens"
    micro = draft.integer("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu") or own
    parts = max(1, -(-own // max(1, micro)))
    return parts, f"{parts} micro-batch{'es' * (parts > 1)} of {min(micro, own)} completions"
