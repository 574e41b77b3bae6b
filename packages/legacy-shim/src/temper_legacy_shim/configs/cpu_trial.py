"""Shrink a translated run for a CPU: two short steps that use every part of it.

The loss, the advantage, the reward, the data and the model stay; sizes, placement, samplers on
GPUs, trackers and checkpoints do not.
"""

import re
from dataclasses import replace

from temper_legacy_shim.configs.reading.config_values import Plain
from temper_legacy_shim.configs.translation import Finding, Setting, Translation

STEPS, PROMPTS, GROUP, TOKENS = 2, 4, 2, 16
"""Most steps, prompts of a step, completions of a prompt, and tokens of a completion."""
_COMMENT = "for the trial on a CPU"
_GONE = re.compile(
    r"rollout(\..*)?|runtime\..*|weight_sync\..*|asynchrony\..*|loop|use_legacy_worker_impl"
    r"|[\w.]*\.(num_workers|pool)|[\w.]+\.engine\.(offload|precision)\..*"
    r"|[\w.]+\.engine\.(sequence_parallel|fsdp_size|reshard_after_forward|forward_prefetch|numa_affinity|attention|liger_layers|compile_layers)"
    r"|[\w.]+\.engine\.(tensor|pipeline|context|expert|expert_tensor)_parallel|[\w.]+\.engine\.(virtual_pipeline|layers_per_stage)"
    r"|[\w.]+\.engine\.(distributed_optimizer|override_\w+_config(\..*)?)"
    r"|[\w.]+\.engine\.schedule\..*|algorithm\.dynamic_sampling(\..*)?"
    r"|run\.(total_epochs|total_steps|save_every|save_interval_s|max_ckpt_to_keep|keep_every|eval_every|resume|dir|trackers)"
    r"|run\.eval_sampling\..*|run\.eval_num_completions|data\.eval\..*"
)
"""Settings that a CPU cannot have, or that a run of two steps does not come to.

A schedule as a whole: its kind and its warm-up's ratio need the length that is left out, and the
first of two steps would have a rate of 0.
"""


def make_cpu_trial(translation: Translation) -> Translation:
    """Return the translation of a trial; without settings it stays as it is."""
    if not translation.settings:
        return translation
    # The rest keeps its values, so that the trial uses the loss and the reward of the run.
    kept = {
        setting.key: _small(setting)
        for setting in translation.settings
        if not _GONE.fullmatch(setting.key)
    }
    task = kept["task"].value if "task" in kept else "rl"
    values: dict[str, Plain] = {
        "actor.engine.device": "cpu",
        "actor.engine.precision.compute": "fp32",
    }
    if task != "generate":
        values |= {"run.total_steps": STEPS, "batching.prompts_per_step": PROMPTS}
    if task in ("rl", "generate"):
        values["sampling.max_tokens"] = TOKENS
    values |= {"run.dir": "runs/cpu_trial", "run.resume": "never", "run.trackers": ["jsonl"]}
    kept |= {key: _trial_setting(key, value) for key, value in values.items()}
    message = (
        f"this is a trial on a CPU: {STEPS} steps of {PROMPTS} prompts, completions of at most "
        f"{TOKENS} tokens, one process, a constant learning rate, "
        "transformers as the sampler, no evaluation and no checkpoints during the run. Translate "
        "again without --cpu-trial for "
        "the run itself."
    )
    note = Finding(level="note", rule="cpu-trial", message=message)
    return replace(
        translation, settings=tuple(kept.values()), findings=(*translation.findings, note)
    )


def _small(setting: Setting) -> Setting:
    """Return a setting, with a smaller number if a trial needs it."""
    most = {
        "batching.num_mini_batches": PROMPTS // 2,
        "batching.num_passes": 1,
        "algorithm.group_size": GROUP,
    }.get(setting.key)
    if most is None or (isinstance(setting.value, int) and setting.value <= most):
        return setting
    return _trial_setting(setting.key, most)


def _trial_setting(key: str, value: Plain) -> Setting:
    return Setting(
        key=key,
        value=value,
        is_pinned=False,
        rule="cpu-trial",
        old_keys=(),
        sources=(),
        is_verbatim=False,
        comment=_COMMENT,
    )
