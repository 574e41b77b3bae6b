"""Which of the trainers behind main_ppo of v0.9.0 ran, and what the loop here does."""

from temper_legacy_shim.configs.draft import Draft
from temper_legacy_shim.configs.rl_facts import is_async, is_one_step_off

SWITCH, MODE = "trainer.use_v1", "trainer.v1.trainer_mode"
_OURS = "loop=sync here samples with the newest weights, scores, and updates, one after the other"


def build_generation(draft: Draft) -> None:
    """Record the original trainer. Programs of the asynchronous recipes have one of their own."""
    is_main = draft.old.entry.rpartition(".")[2] in ("", "main_ppo")
    if SWITCH not in draft.old.defaults or not is_main or is_async(draft) or is_one_step_off(draft):
        return
    written = "written" if draft.old.is_set(SWITCH) else "the default"
    mode = draft.text(MODE) or "sync"
    if not draft.switch(SWITCH):
        said = f"{SWITCH}=False ({written}) ran the trainer that main_ppo had before v0.9.0 (main_ppo_v0)"
        draft.find("note", "trainer-generation", f"{said}; {_OURS}, as it did.", SWITCH)
    elif mode == "sync":
        said = f"{SWITCH}=True ({written}) ran the second trainer, with {MODE}=sync: batches went through TransferQueue"
        draft.find("note", "trainer-generation", f"{said}; {_OURS}, and its batches go straight to the workers.", SWITCH)
    else:
        _ahead(draft, mode)


def _ahead(draft: Draft, mode: str) -> None:
    """A mode that samples while it trains, so that samples are of older weights."""
    threshold = draft.integer("trainer.v1.sampler.max_off_policy_threshold")
    draft.find(
        "person",
        "trainer-generation",
        f"{MODE} is {mode}: the second trainer of {draft.old.version} then trained on samples of older weights (max_off_policy_threshold "
        f"{threshold}), and {_OURS}. Keep that (take the key out), or choose loop=one_step_off or loop=async with rollout.pool=rollout.",
        MODE,
    )
