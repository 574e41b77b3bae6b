"""Batch arithmetic: prompts, completions, mini-batches and token budgets."""

import math

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    GENERATED,
    completions_per_prompt,
    filters_groups,
    is_async,
    is_second_trainer,
    needs_critic,
    prompts_of_step,
    response_key,
)
from temper_legacy_shim.configs.mapping.roles.roles import (
    ACTOR,
    CRITIC,
    OldRole,
    data_parallel,
    is_megatron,
    sequence_parallel,
    world_size,
)

ACTOR_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def build_batches(draft: Draft) -> None:
    """Set prompts, updates and passes of a step, and the cap of a micro-batch."""
    prompts, keys = prompts_of_step(draft)
    # A question about the batch size exists already, and all sizes below follow from it.
    if prompts is None:
        return
    draft.put(
        "batching.prompts_per_step",
        prompts,
        rule="prompts-per-step",
        old=keys,
        verbatim=keys == ["data.train_batch_size"],
    )
    _check_generated(draft, prompts=prompts)
    if keys == [GENERATED]:
        _explain_generated(draft, generated=prompts)
    _updates(draft, prompts=prompts, keys=keys)
    _check_ranks(draft, prompts=prompts, keys=keys)
    _check_critic(draft)
    _passes(draft)
    _tokens(draft)


def _passes(draft: Draft) -> None:
    """Set the passes over the samples of a step, which all roles make."""
    key, critics = "actor_rollout_ref.actor.ppo_epochs", "critic.ppo_epochs"
    # DataParallelPPOActor.update_policy of v0.2 cut the batch once and made no loop over
    # ppo_epochs. Megatron's make_minibatch_iterator had the number of epochs from the start.
    if not draft.since("v0.3.0.post0") and not is_megatron(draft):
        for each in (key, critics):
            draft.explain_drop(each, f"FSDP's workers of {draft.old.version} made one pass")
        return
    passes, epochs = draft.integer(key), draft.integer(critics)
    # The new run raises a number below 1, so the old text must not be copied.
    is_other = passes is None or passes >= 1
    draft.put(
        "batching.num_passes", max(1, passes or 1), rule="passes", old=[key], verbatim=is_other
    )
    if needs_critic(draft) and epochs is not None and epochs != (passes or 1):
        draft.find("critic-passes", critics, epochs=epochs)


def _check_generated(draft: Draft, *, prompts: int) -> None:
    """Report a batch of the data loader that the second trainer could not fill a step with."""
    generated = draft.integer(GENERATED)
    # Filtering and the asynchronous modes of the second trainer fetch prompt by prompt, so that any
    # number of prompts is reached.
    is_exact = filters_groups(draft) or draft.text("trainer.v1.trainer_mode") not in ("", "sync")
    if generated and prompts % generated and is_second_trainer(draft) and not is_exact:
        draft.find("gen-batch", GENERATED, generated=generated, prompts=prompts)


def _explain_generated(draft: Draft, *, generated: int) -> None:
    """Say that a step had the prompts of the data loader, not data.train_batch_size."""
    key = "data.train_batch_size"
    version, train = draft.old.version, draft.integer(key)
    draft.explain_drop(key, f"the data loader of {version} took {GENERATED} prompts for a step")
    if train is not None and train != generated:
        draft.find("prompts-per-step.generated", GENERATED, generated=generated, train=train)


def _updates(draft: Draft, *, prompts: int, keys: list[str]) -> None:
    """Set the updates of one pass: the prompts of a step divided by the mini-batch."""
    mini = draft.integer(ACTOR_MINI)
    if mini is None:
        return
    # It counts prompts: ActorRolloutRefWorker.__init__ multiplies it by rollout.n.
    old = [*keys, *([] if ACTOR_MINI in keys else [ACTOR_MINI])]
    if mini < 1:
        draft.find("mini-batches.below-one", ACTOR_MINI, mini=mini)
        return
    if mini > prompts:
        draft.find("mini-batches.above-prompts", *old, mini=mini, prompts=prompts)
    # The old loop cut the batch into mini-batches, and what was left over was an update, too.
    count = max(1, math.ceil(prompts / mini))
    if prompts % mini and mini < prompts:
        last = prompts - mini * (count - 1)
        draft.find(
            "mini-batches.remainder", *old, prompts=prompts, mini=mini, count=count, last=last
        )
    draft.put("batching.num_mini_batches", count, rule="mini-batches", old=old)


def _check_ranks(draft: Draft, *, prompts: int, keys: list[str]) -> None:
    """Report sizes that the old trainer refused or rounded down."""
    world, ranks = world_size(draft), data_parallel(draft, ACTOR)
    if world is None or ranks is None or is_async(draft):
        return
    n = completions_per_prompt(draft)
    total, mini = prompts * n, draft.integer(ACTOR_MINI) or prompts
    # validate_config (before v0.7.0 RayPPOTrainer._validate_config) asserts that the completions of
    # a step divide by the ranks, so that such a run never started.
    if total % ranks:
        draft.find(
            "batch-divides",
            *keys,
            "trainer.n_gpus_per_node",
            prompts=prompts,
            n=n,
            total=total,
            ranks=ranks,
        )
        return
    # ActorRolloutRefWorker.__init__ divides with //: a remainder was lost without a message, and an
    # update had fewer completions than the configuration says.
    if (mini * n) % ranks:
        draft.find(
            "mini-batch-floor",
            ACTOR_MINI,
            mini=mini,
            n=n,
            detail=mini * n,
            ranks=ranks,
            detail_2=mini * n // ranks,
            detail_3=mini * n // ranks * ranks,
        )
    micro = _micro(draft, ACTOR, ranks=ranks)
    if micro and not draft.switch("actor_rollout_ref.actor.use_dynamic_bsz"):
        # The old workers multiplied it by rollout.n and divided by the ranks before they cut it.
        local = mini * n // ranks
        if micro > 0 and local % micro:
            draft.find(
                "micro-batch-divides",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
                local=local,
                micro=micro,
            )


def _micro(draft: Draft, role: OldRole, *, ranks: int) -> int | None:
    """Return a micro-batch's sequences on one rank, from the global key as the old workers."""
    own = draft.integer(f"{role.block}.ppo_micro_batch_size_per_gpu")
    full = draft.integer(f"{role.block}.ppo_micro_batch_size")
    key, both = f"{role.block}.ppo_micro_batch_size", f"{role.block}.ppo_micro_batch_size_per_gpu"
    if full is None:
        return own
    # From v0.5.0 on, the size per GPU is an interpolation of this key in the trees.
    follows = both not in draft.old.origin
    if own is not None and draft.old.is_set(key) and follows:
        release = draft.old.version
        draft.find("micro-batch-both.one-set", key, both=both, release=release)
    elif own is not None and draft.old.is_set(key):
        draft.find("micro-batch-both.both-set", key, both, both=both)
        return own
    # The worker divided it with // as well.
    if full % ranks:
        draft.find(
            "micro-batch-global.completions", key, full=full, ranks=ranks, detail=full // ranks
        )
    return max(1, full // ranks)


def _check_critic(draft: Draft) -> None:
    """Report a critic with separate mini-batches: all roles share them here."""
    if not needs_critic(draft):
        return
    mini, actor = draft.integer("critic.ppo_mini_batch_size"), draft.integer(ACTOR_MINI)
    n = completions_per_prompt(draft)
    if mini is None or actor is None:
        return
    # Since v0.4.0 CriticWorker.__init__ multiplies it by rollout_n, as the actor's worker always
    # did. Before, the same number meant completions and not prompts.
    counted = mini if draft.since("v0.4.0") else mini / n
    # Temper's plan of mini-batches is shared by all roles of a step.
    if counted != actor:
        note = (
            ""
            if draft.since("v0.4.0")
            else f" (before v0.4.0 it counted completions: {mini} / {n} = {counted:g} prompts)"
        )
        key = "critic.ppo_mini_batch_size"
        name = "critic-mini-batches.set" if draft.old.is_set(key) else "critic-mini-batches.default"
        draft.find(name, key, mini=mini, note=note, actor=actor)


def _tokens(draft: Draft) -> None:
    """Set one cap for all passes: the largest micro-batch of the old actor."""
    prompt, response = (
        draft.integer("data.max_prompt_length") or 0,
        draft.integer(response_key(draft)) or 0,
    )
    longest = prompt + response
    budget, old = _budget(draft, ACTOR, longest=longest)
    if needs_critic(draft):
        other, _ = _budget(draft, CRITIC, longest=longest)
        if (
            other is not None
            and budget is not None
            and other < budget
            and draft.old.is_set("critic.ppo_max_token_len_per_gpu")
        ):
            # All passes share one cap here: the smaller one keeps the critic within its memory.
            budget, old = other, [*old, "critic.ppo_max_token_len_per_gpu"]
    if budget is None:
        return
    is_raised = budget < longest
    if is_raised:
        draft.find(
            "token-budget", *old, budget=budget, prompt=prompt, response=response, longest=longest
        )
        budget = longest
    draft.put(
        "batching.max_tokens",
        budget,
        rule="token-budget",
        old=old,
        verbatim=len(old) == 1 and not is_raised,
    )


def _budget(draft: Draft, role: OldRole, *, longest: int) -> tuple[int | None, list[str]]:
    """Return the tokens of a micro-batch on a data-parallel rank, and the keys that set them."""
    dynamic = f"{role.block}.use_dynamic_bsz"
    if draft.switch(dynamic):
        key = f"{role.block}.ppo_max_token_len_per_gpu"
        each = draft.integer(key)
        if each is None:
            # A text is a variable of the shell, which only a run knows.
            return (None if isinstance(draft.old.get(key), str) else longest), [key]
        # Ranks that share a sequence added their budgets: update_policy multiplied the key by
        # ulysses_sequence_parallel_size (dp_actor.py) or context_parallel_size (megatron_actor.py).
        sharing = 1 if is_megatron(draft) else sequence_parallel(draft, role)
        extra = [f"{role.block}.ulysses_sequence_parallel_size"] if sharing > 1 else []
        if is_megatron(draft):
            context = draft.integer(f"{role.megatron}.context_parallel_size") or 1
            sharing, extra = (
                context,
                [f"{role.megatron}.context_parallel_size"] if context > 1 else [],
            )
        return each * sharing, [key, *extra]
    # Without use_dynamic_bsz the old workers cut micro-batches by completions, each padded to the
    # longest one, so that this many tokens have fit into memory.
    ranks = data_parallel(draft, role) or 1
    micro = _micro(draft, role, ranks=ranks)
    keys = [
        f"{role.block}.ppo_micro_batch_size_per_gpu",
        f"{role.block}.ppo_micro_batch_size",
        "data.max_prompt_length",
        response_key(draft),
    ]
    if micro is None:
        return max(longest, 1), keys[2:]
    return max(micro, 1) * longest, keys
