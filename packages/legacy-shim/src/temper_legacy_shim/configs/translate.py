"""The translation from beginning to end.

It reads, composes on the default tree, builds settings, and accounts for every token. A trial for a
CPU has two short steps that use every part of the run: loss, advantage, reward, data and model
stay; sizes, placement, samplers on GPUs, trackers and checkpoints do not.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from temper_legacy_shim.configs.mapping.builder import Draft, Numerics
from temper_legacy_shim.configs.mapping.programs import (
    build_columns,
    build_evaluation,
    build_generate_task,
    build_ppo,
    build_sft,
)
from temper_legacy_shim.configs.mapping.roles.model_checks import (
    NEUTRAL,
    find_images,
    find_model_fields,
    find_refused_models,
    find_template_arguments,
)
from temper_legacy_shim.configs.mapping.roles.roles import is_megatron
from temper_legacy_shim.configs.mapping.rules import find_rule, is_block
from temper_legacy_shim.configs.reading.composition import (
    OldConfig,
    assign,
    compose,
    forget_defaults,
    old_config,
)
from temper_legacy_shim.configs.reading.config_values import (
    FROM_FILE,
    Override,
    Plain,
    flatten,
    hydra_text,
    read_overrides,
)
from temper_legacy_shim.configs.reading.entry_points import (
    GROUPS,
    Launch,
    Program,
    is_placed_choice,
    launch_of,
)
from temper_legacy_shim.configs.reading.trees import composed_tree, known_version, versions
from temper_legacy_shim.configs.reading.versions import infer_version, other_meanings, releases_with
from temper_legacy_shim.configs.report import report_tokens
from temper_legacy_shim.configs.translation import (
    Cluster,
    Finding,
    Setting,
    Source,
    TokenReport,
    Translation,
)

_BUILDERS: dict[Program, Callable[[Draft], None]] = {
    "ppo": build_ppo,
    "sft": build_sft,
    "sft1": build_columns,
    "generation": build_generate_task,
    "evaluation": build_evaluation,
}
_USUAL: Mapping[str, tuple[Plain, ...]] = {
    "trainer.device": ("cuda", "auto"),
    "actor_rollout_ref.model.lora.type": ("lora", "canonical_lora", "vlm_lora"),
    "critic.model.lora.type": ("lora", "canonical_lora", "vlm_lora"),
    "actor_rollout_ref.rollout.repetition_penalty": (1.0,),
}
"""Values that request the existing behavior."""
_WEIGHTS = {"person": 0, "refused": 1, "hazard": 2, "note": 3}


def translate(
    overrides: Sequence[str] = (),
    *,
    entry: str = "",
    config_name: str | None = None,
    version: str | None = None,
    cluster: Cluster | None = None,
    numerics: Numerics = "temper",
    base: Mapping[str, Plain] | None = None,
    expanded: Mapping[str, str] | None = None,
) -> Translation:
    """Translate one invocation of an old system.

    Reads no file but the package's own tables and, where the model is a local folder, its
    config.json.

    Args:
        overrides: tokens of the command line after the shell (or before it: a ``$NAME`` that cannot
            be known stays as it is). Options of Hydra's own, such as ``--config-name=NAME``, and
            the shell's ``"$@"`` may stand among them.
        entry: the module or file that was started, such as ``verl.trainer.main_ppo``; empty guesses
            it from the keys.
        config_name: Hydra's; if it is None, an option among the overrides, or the entry's own.
        version: the release, such as ``v0.7.0``; None infers it from the keys.
        cluster: nodes and GPUs, where the launcher says them and the configuration does not
            (torchrun); it wins over the configuration.
        numerics: ``legacy`` pins the old workers where they were in use; ``temper`` lists what
            differs without them.
        expanded: by key, what a script puts into a variable that stands for its value; only signs
            of images are read from it.
        base: a configuration of the user's own under the overrides: nested values of a YAML file,
            over the release's defaults.

    Returns:
        The new settings, one report for each token, and findings; see Translation. Settings whose
        ``is_verbatim`` is set may keep the raw text of their source in a script.

    Raises:
        UsageError: the version is unknown, or lacks this program.
    """
    tokens = read_overrides(overrides)
    given = flatten(dict(base or {}))
    # Hydra's own list; the files it names are in `base` already.
    given.pop("defaults", None)
    launch = launch_of(entry, config_name=config_name, overrides=tokens, given=given)
    source, candidates = _source(tokens, launch=launch, version=version, given=given)

    def drafted(release: str) -> Draft:
        old = _compose(tokens, launch=launch, version=release, given=given)
        return _built(
            Draft(
                old=old,
                numerics=numerics,
                cluster=cluster,
                config_name=launch.config_name,
                expanded=expanded or {},
            ),
            launch,
        )

    # Drafts are cheap: trees and rules are read once in a process.
    draft = drafted(source.version)
    if version is not None and source.version != known_version(version):
        draft.find("program-release", entry=entry or launch.program, given=version)
    _other_releases(
        draft,
        # All releases that take the keys are translated, so that a difference in meaning is
        # reported instead of guessed.
        {release: drafted(release).settings for release in candidates if release != source.version},
    )
    unmapped = _unmapped(draft, tokens, launch.program)
    if not launch.foreign:  # its settings are of a tree that is not here
        _refusals(draft, tokens, unmapped)
    listed = [*_set_in_file(draft.old), *tokens]
    _find_placed(draft, listed)
    reports = report_tokens(draft, listed, program=launch.program)
    _losses(draft, listed, reports)
    return Translation(
        source=source,
        settings=_written(draft),
        tokens=reports,
        findings=tuple(sorted(draft.findings, key=lambda finding: _WEIGHTS[finding.level])),
        unmapped=unmapped,
    )


def _source(
    tokens: Sequence[Override], *, launch: Launch, version: str | None, given: dict[str, Plain]
) -> tuple[Source, tuple[str, ...]]:
    """Return the source, and the possible releases if none was given."""
    program = "sft" if launch.program == "sft1" else launch.program
    candidates: tuple[str, ...] = ()
    if version is None:
        candidates, evidence = infer_version(
            tokens,
            family=launch.family,
            configs=launch.configs,
            entry=launch.entry,
            given=given,
        )
        taken = candidates[-1]
    else:
        taken, evidence = known_version(version), (f"given as {version}",)
    nearest = releases_with(launch.family, launch.configs, launch.entry)
    if taken not in nearest:
        taken = (
            nearest[-1] if versions().index(taken) > versions().index(nearest[-1]) else nearest[0]
        )
        evidence = (*evidence, f"that release had no such program; {taken} did")
    source = Source(
        version=taken,
        is_given=version is not None,
        evidence=evidence,
        entry=launch.entry,
        family=launch.family,
        program=program,
    )
    return source, candidates


def _compose(
    tokens: Sequence[Override], *, launch: Launch, version: str, given: dict[str, Plain]
) -> OldConfig:
    defaults = composed_tree(version, launch.family, launch.configs)
    old = old_config(version=version, family=launch.family, entry=launch.entry, defaults=defaults)
    for key, value in given.items():
        assign(old, key, value, FROM_FILE)
    # A dump has each key of its release. What equals the default says nothing about the user.
    forget_defaults(old)
    compose(old, [token for token in tokens if token.key not in GROUPS])
    return old


def _built(draft: Draft, launch: Launch) -> Draft:
    if launch.foreign:
        draft.find("foreign", foreign=launch.foreign)
    if launch.is_fork and not launch.foreign:
        draft.find("fork-program", entry=launch.entry, program=launch.program)
    if launch.contradiction:
        draft.find(
            "strategy.contradiction",
            "actor_rollout_ref.actor.strategy",
            contradiction=launch.contradiction,
        )
    find_images(draft)
    find_model_fields(draft)
    find_template_arguments(draft)
    if not launch.foreign:
        find_refused_models(draft)
    _BUILDERS[launch.program](draft)
    return draft


def _other_releases(draft: Draft, others: Mapping[str, Mapping[str, Setting]]) -> None:
    clauses = other_meanings(draft.settings, others)
    if clauses:
        taken = draft.old.version
        fit = f"its keys fit {next(iter(others))} to {taken}, and {taken} was taken"
        draft.find("release-unsure", fit=fit, names="; ".join(clauses))


def _refusals(draft: Draft, tokens: Sequence[Override], unmapped: Mapping[str, Plain]) -> None:
    """Report overrides that the release refused; those of a sweep are one question."""
    swept = [token for token in tokens if token.is_sweep]
    is_swept = any(token.is_sweep_switch for token in tokens)
    if is_swept and swept:
        keys = [token.key for token in swept]
        draft.find("multirun", *keys, keys=", ".join(keys))
    for index, complaint in sorted(draft.old.refused.items()):
        token = tokens[index]
        if token.key not in unmapped and not (is_swept and token.is_sweep):
            draft.find("refused", token.key, text=token.text, complaint=complaint)


def _find_placed(draft: Draft, tokens: Sequence[Override]) -> None:
    """Ask about groups that are placed by hand and whose values are not those that were read."""
    for token in tokens:
        if (
            token.kind == "set"
            and "@" in token.key
            # A choice such as actor@actor_rollout_ref.actor=dp_actor is what the release's own list
            # says.
            and not is_placed_choice(str(token.value), is_megatron=is_megatron(draft))
        ):
            draft.find("group-packages", token.key, text=token.text)


def _unmapped(draft: Draft, tokens: Sequence[Override], program: Program) -> dict[str, Plain]:
    """Return the keys of no release: a fork's own. They are listed, and never guessed."""
    result = {
        key: draft.old.get(key)
        for key in draft.old.origin
        if key not in GROUPS and find_rule(program, key) is None and not is_block(key)
    }
    unruled = [
        token for token in tokens if token.is_no_block and find_rule(program, token.key) is None
    ]
    result |= {token.key: token.value for token in unruled if is_block(token.key)}
    for key, value in result.items():
        index = draft.old.origin.get(key, -1)
        is_added = index >= 0 and tokens[index].prefix in ("+", "++")
        what = (
            "took it because of the +, and its configuration has no such key"
            if is_added
            else "would not have started with it"
        )
        is_what = "stands for a block of keys" if is_block(key) else "is a key of no release"
        draft.find("unmapped", key, value=value, is_what=is_what, what=what)
    return result


def _set_in_file(old: OldConfig) -> list[Override]:
    """Return the file's values that no token replaces and that are no defaults, as tokens."""
    return [
        Override(
            index=FROM_FILE,
            text=f"{key}={hydra_text(old.tree[key])}",
            kind="set",
            key=key,
            value=old.tree[key],
        )
        for key, index in old.origin.items()
        if index == FROM_FILE
    ]


def _losses(draft: Draft, tokens: Sequence[Override], reports: Sequence[TokenReport]) -> None:
    """Report settings by the user that were dropped and may be missed."""
    reported = {key for finding in draft.findings for key in finding.old_keys}
    for token, report in zip(tokens, reports, strict=True):
        usual = (*NEUTRAL, *_USUAL.get(token.key, ()), draft.old.defaults.get(token.key))
        is_question = report.disposition == "needs a person"
        is_lost = (
            (report.disposition == "dropped" or is_question)
            and report.hazard
            and token.value not in usual
        )
        if is_lost and token.key not in reported and token.key not in draft.drop_reasons:
            draft.report(
                "person" if is_question else "hazard",
                report.rule,
                f"{token.text} has no counterpart. {report.hazard}",
                token.key,
            )


def _written(draft: Draft) -> tuple[Setting, ...]:
    """Return the settings, groups first; nothing without a counterpart."""
    if any(
        finding.level == "person" and finding.rule in ("images", "foreign")
        for finding in draft.findings
    ):
        return ()
    settings = draft.settings.values()
    return (
        *(item for item in settings if item.is_group),
        *(item for item in settings if not item.is_group),
    )


__all__ = ["Finding", "translate"]


STEPS, PROMPTS, GROUP, TOKENS = 2, 4, 2, 16
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
        f"{TOKENS} tokens, one process, a constant learning rate, transformers as the sampler, no "
        "evaluation and no checkpoints during the run. Translate again without --cpu-trial for the "
        "run itself."
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
