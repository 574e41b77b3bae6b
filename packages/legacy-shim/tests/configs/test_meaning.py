"""Meaning kept.

What the old run did and what the new one would do, each computed by code that knows nothing of the
translator.

The old side is composed by Hydra's parser and OmegaConf on the trees as they were recorded, the new
side is the written YAML over the trainer's defaults. One table of behavior-carrying keys; no
difference is left without a reason.
"""

import importlib.util
import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip(
    "hydra", reason="needs Hydra, which temper-trainer brings, to compose the old side with"
)

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from temper_legacy_shim.configs import translate
from temper_legacy_shim.configs.mapping.builder import trainer_defaults
from temper_legacy_shim.configs.reading.config_values import flatten
from temper_legacy_shim.configs.report import yaml_of

from .conftest import BASE
from .meaning_page import meaning_page

A = "actor_rollout_ref.actor"
TOOL = Path(__file__).parents[2] / "tools/build_trees.py"
Old = Callable[[str], object]


def old_effective(facts: Path, row: Mapping[str, object]) -> Old:
    """Return the value of a key as the old system had it; None where there is none."""
    overrides = [str(token) for token in row["overrides"]]  # type: ignore[attr-defined]
    file = facts / "defaults" / str(row["tag"]) / f"{tree_of(row)}.json"
    tree = pickle.loads(pickled_defaults(file, tag=str(row["tag"]), config=own_config(row)))
    for token in overrides:
        if token.startswith(("-", '"', "$", "model_engine", "engine=", "optim=")):
            continue
        override = parse_override(token)
        if not override.is_delete():
            OmegaConf.update(tree, str(override.key_or_group), override.value(), force_add=True)

    def get(key: str) -> object:
        try:
            result = OmegaConf.select(tree, key)
        except OmegaConfBaseException:
            return None
        return (
            OmegaConf.to_container(result, resolve=True) if OmegaConf.is_config(result) else result
        )

    return get


OWN_CONFIGS = {
    "fully_async_main": "fully_async_ppo_trainer",
    "one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "main_dapo": "dapo_trainer",
    "main_entropy": "entropy_trainer",
}
"""Configuration that an entry's ``hydra.main`` composes by default."""


def tree_of(row: Mapping[str, object]) -> str:
    """Return the recorded tree below a row's own configuration."""
    engine, entry = "megatron" if is_on_megatron(row) else "fsdp", str(row["entry"])
    if entry.endswith("fsdp_sft_trainer"):
        return "sft_fsdp"
    if entry.endswith("sft_trainer"):
        return f"sft_engine_{engine}"
    return "generation" if entry.endswith("main_generation") else f"main_ppo_{engine}"


@cache
def recorded() -> dict[str, dict[str, tuple[str, dict[str, object]]]]:
    """Read the configurations of all entries through the tool that composed them."""
    spec = importlib.util.spec_from_file_location("build_trees", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    configs: dict[str, dict[str, tuple[str, dict[str, object]]]] = module.Packed.read(
        module.DATA
    ).configs
    return configs


def own_config(row: Mapping[str, object]) -> str:
    """Return the row's own configuration, or "" if it has none above the recorded tree."""
    entry, named = str(row["entry"]), str(row["config_name"] or "").removesuffix(".yaml")
    usual = next((config for part, config in OWN_CONFIGS.items() if entry.endswith(part)), "")
    return named if named in recorded() else usual


@cache
def pickled_defaults(file: Path, *, tag: str, config: str) -> bytes:
    """Return a release's default tree with its interpolations and what `config` sets in it.

    It is pickled, because reading it takes a tenth of the time to compose or copy it.
    """
    nested: dict[str, Any] = {}
    for key, value in json.loads(file.read_text())["flat"].items():
        *groups, name = key.split(".")
        reduce(lambda group, inner: group.setdefault(inner, {}), groups, nested)[name] = value
    tree = OmegaConf.create(nested)
    own = recorded()[config][tag][1] if config else {}
    for key, value in own.items():
        OmegaConf.update(tree, key, value, force_add=True)
    return pickle.dumps(tree)


@cache
def parse_override(token: str) -> Override:
    """Parse a token as Hydra does; many rows have the same."""
    return OverridesParser.create().parse_override(token)


def is_on_megatron(row: Mapping[str, object]) -> bool:
    given = [
        token
        for token in row["overrides"]
        if str(token).startswith((f"{A}.strategy=", "model_engine=", "engine="))
    ]  # type: ignore[attr-defined]
    return "megatron" in f"{row['config_name']}{given}"


def number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def release(row: Mapping[str, object]) -> tuple[int, ...]:
    return tuple(int(part) for part in str(row["tag"]).lstrip("v").split(".")[:3] if part.isdigit())


AGGREGATIONS: Mapping[object, str] = {
    None: "token_mean",  # before v0.4.0 there was no choice
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
    "token-sum": "token_sum",
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ADVANTAGES = {"tir_optimal_token_baseline": "optimal_token_baseline"}
LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}


def expectations(old: Old, row: Mapping[str, object]) -> dict[str, object]:
    """Return the expected values of the new run, worked out by hand from the old code."""
    before_4 = release(row) < (0, 4)
    in_loss = bool(old(f"{A}.use_kl_loss"))
    in_reward = (not in_loss) if before_4 else bool(old("algorithm.use_kl_in_reward"))
    loss_coef = number(old(f"{A}.kl_loss_coef")) if in_loss else 0.0
    reward_coef = number(old("algorithm.kl_ctrl.kl_coef")) if in_reward else 0.0
    estimator = expected_estimator(str(old("algorithm.kl_penalty")), "") if reward_coef else None
    estimator = (
        expected_estimator(*str(old(f"{A}.kl_loss_type")).partition("+")[:2])
        if loss_coef
        else estimator
    )
    prompts, mini = number(old("data.train_batch_size")), number(old(f"{A}.ppo_mini_batch_size"))
    has_passes = release(row) >= (0, 3) or is_on_megatron(row)
    passes = number(old(f"{A}.ppo_epochs")) if has_passes else 1
    calls, per_call = (1, 1) if not is_async(row) else async_calls(old)
    if is_async(row):
        prompts = mini * calls * per_call
    elif takes_generated_batch(old, row):
        prompts = number(old("data.gen_batch_size"))
    updates = max(1, math.ceil(prompts / mini))
    denominator = denominator_of(old, row)
    can_clip = updates * passes > 1 or reward_coef > 0 or denominator == "rollout"
    name, is_scaled = (
        str(old("algorithm.adv_estimator")),
        old("algorithm.norm_adv_by_std_in_grpo") is not False,
    )
    full = old(f"{A}.clip_ratio")
    low, high = old(f"{A}.clip_ratio_low"), old(f"{A}.clip_ratio_high")
    is_greedy = before_4 and old("actor_rollout_ref.rollout.val_kwargs.temperature") is None
    is_served = release(row) >= (0, 7) or (
        release(row) >= (0, 4, 1)
        and (is_async(row) or old("actor_rollout_ref.rollout.mode") == "async")
    )
    samples = is_served or (
        bool(old("actor_rollout_ref.rollout.val_kwargs.do_sample")) and not is_greedy
    )
    val_temperature = old("actor_rollout_ref.rollout.val_kwargs.temperature")
    eval_temperature = number(val_temperature) if samples else 0.0
    adapter = (
        "actor_rollout_ref.model.lora." if is_on_megatron(row) else "actor_rollout_ref.model.lora_"
    )  # each engine read its own
    rank = int(number(old(f"{adapter}rank") or 0))
    warmup = old(f"{A}.optim.lr_warmup_steps")
    result = {
        "algorithm.group_size": old("actor_rollout_ref.rollout.n"),
        DENOMINATOR: denominator,
        "run.eval_every": evaluation_frequency(old, row),
        "algorithm.advantage.name": ADVANTAGES.get(
            name, "dr_grpo" if name == "grpo" and not is_scaled else name
        ),
        "algorithm.kl_loss_coef": loss_coef,
        "algorithm.kl_reward_coef": reward_coef,
        "algorithm.kl_estimator": estimator if loss_coef or reward_coef else "k3",
        # kl_penalty bounded the k3 of a token at 10, in every release.
        "algorithm.kl_clamp": 10.0
        if estimator is not None and estimator.startswith("k3")
        else None,
        "algorithm.policy_loss.clip_low": (low if low is not None else full) if can_clip else 0.2,
        "algorithm.policy_loss.clip_high": (high if high is not None else full)
        if can_clip
        else 0.2,
        "algorithm.policy_loss.dual_clip": old(f"{A}.clip_ratio_c") if can_clip else None,
        "algorithm.entropy_coef": old(f"{A}.entropy_coeff"),
        "algorithm.aggregation": AGGREGATIONS[aggregation_of(old, row)],
        "batching.prompts_per_step": prompts,
        "batching.num_mini_batches": updates,
        "batching.num_passes": passes,
        "sampling.temperature": old("actor_rollout_ref.rollout.temperature"),
        "sampling.top_p": old("actor_rollout_ref.rollout.top_p"),
        # Agent loops sent it to their servers since v0.7.1.
        "sampling.top_k": 0
        if is_served and (0, 5) <= release(row) < (0, 7, 1)
        else max(0, int(number(old("actor_rollout_ref.rollout.top_k")))),
        "sampling.max_tokens": old("actor_rollout_ref.rollout.response_length"),
        "run.eval_sampling.max_tokens": old("actor_rollout_ref.rollout.response_length")
        if evaluation_frequency(old, row) is not None
        else None,
        "data.max_prompt_tokens": old("data.max_prompt_length"),
        "actor.engine.precision.compute": compute_dtype(old, row),
        "rollout.dtype": DTYPES[old("actor_rollout_ref.rollout.dtype")]
        if old("actor_rollout_ref.rollout.name") != "hf"
        else None,
        "actor.engine.optimizer.lr": old(f"{A}.optim.lr"),
        "actor.engine.schedule.warmup_steps": warm_updates(warmup)
        * (int(per_call * passes) if is_async(row) else 1),
        "actor.engine.schedule.advance": "update" if is_async(row) else "rl_step",
        "actor.engine.lora.rank": rank,
        "run.eval_sampling.temperature": eval_temperature,
        # Greedy completions of one prompt are equal, so their number has no effect.
        "run.eval_num_completions": int(number(old("actor_rollout_ref.rollout.val_kwargs.n") or 1))
        if eval_temperature and old("data.val_files")
        else 1,
        "data.shuffle": True if old("data.shuffle") is None else old("data.shuffle"),
    }
    if aggregation_of(old, row) == "seq-mean-token-sum-norm":
        # Sums of rows over a fixed number: the one that was given to engines, or the padded width
        # of the responses.
        factor = None if has_old_workers(old, row) else old(f"{A}.loss_scale_factor")
        result["algorithm.horizon"] = factor or old("actor_rollout_ref.rollout.response_length")
    if rank:
        result["actor.engine.lora.alpha"] = old(f"{adapter}alpha")
    result |= optimisation(
        old, row, role=A, new="actor.engine", adam=lambda: old(f"{A}.optim.optimizer")
    )
    mode = old(f"{A}.policy_loss.loss_mode") or "vanilla"
    result["algorithm.policy_loss.name"] = LOSSES.get(str(mode))
    if str(mode).startswith("dppo_"):
        result["algorithm.policy_loss.divergence"] = str(mode).removeprefix("dppo_")
        result["algorithm.policy_loss.max_ratio"] = old(f"{A}.clip_ratio_c") if can_clip else None
    if name == "grpo_passk":
        result["algorithm.advantage.scale_by_std"] = is_scaled
    if int(number(warmup or 0)) > 0:
        result[FIRST_RATE] = 0.0
    if is_async(row):
        result["run.total_steps"] = max(
            1, int(number(old("rollout.total_rollout_steps")) // prompts)
        )
    result |= filtering(old, row)
    if name == "gae":
        result |= optimisation(
            old, row, role="critic", new="critic.engine", adam=lambda: old("critic.optim.optimizer")
        )
        result |= {
            "algorithm.advantage.gamma": old("algorithm.gamma"),
            "algorithm.advantage.gae_lambda": old("algorithm.lam"),
            "algorithm.advantage.value_clip": old("critic.cliprange_value"),
            "algorithm.whiten_advantages": True,
            "critic.engine.optimizer.lr": old("critic.optim.lr"),
        }
    return result


DTYPES: Mapping[object, str] = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}


def aggregation_of(old: Old, row: Mapping[str, object]) -> object:
    """Return how a policy loss was aggregated; some losses of core_algos.py read no key."""
    loss = old(f"{A}.policy_loss.loss_mode")
    if loss in ("sapo", "geo_mean") or (loss == "gspo" and row["tag"] != "v0.9.1"):
        return "seq-mean-token-mean"
    return old(f"{A}.loss_agg_mode")


def has_old_workers(old: Old, row: Mapping[str, object]) -> bool:
    is_off = release(row) >= (0, 7) and old("trainer.use_legacy_worker_impl") == "disable"
    return release(row) < (0, 8) and not is_off


def compute_dtype(old: Old, row: Mapping[str, object]) -> str:
    """Return the dtype of the actor's matmuls; the sampler has its own."""
    tag = release(row)
    has_workers = tag >= (0, 6, 1) and has_old_workers(old, row)
    own = "megatron" if is_on_megatron(row) else "fsdp_config"
    is_read = tag >= (0, 6, 1) if is_on_megatron(row) else has_workers
    mixed = None if is_on_megatron(row) else old(f"{A}.fsdp_config.mixed_precision.param_dtype")
    return DTYPES[mixed or (old(f"{A}.{own}.dtype") if is_read else None) or "bfloat16"]


def expected_estimator(word: str, plus: str) -> str | None:
    """Return the estimator of a word; with a plus, the one with the gradient of k2."""
    value = KL_ESTIMATORS.get(word.removesuffix("+"))
    return value if value is None or not plus or value == "k2" else f"{value}+"


DENOMINATOR = "denominator of the ratio"
"""Not a key: whether algorithm.rollout_correction.name is rollout_ratio."""


def is_async(row: Mapping[str, object]) -> bool:
    return str(row["entry"]).endswith("fully_async_main")


def is_dapo(row: Mapping[str, object]) -> bool:
    return str(row["entry"]).endswith(("main_dapo", "main_entropy"))


def async_calls(old: Old) -> tuple[int, int]:
    """Return (calls of the trainer between two weight syncs, mini-batches of a call)."""
    calls, batches = (
        old("async_training.trigger_parameter_sync_step"),
        old("async_training.require_batches"),
    )
    return int(number(calls)), int(number(batches))


def warm_updates(warmup: object) -> int:
    return max(0, int(number(warmup))) if warmup is not None else 0


def denominator_of(old: Old, row: Mapping[str, object]) -> str:
    """Return whose log-probs the ratio is to: by each trainer's own code at the tag."""
    entry, tag = str(row["entry"]), release(row)
    if is_async(row) and tag < (0, 7, 1):
        is_rollout = bool(old("async_training.use_rollout_log_probs")) and not old(
            "async_training.compute_prox_log_prob"
        )
    elif is_dapo(row) or ("one_step_off" in entry and tag < (0, 7, 0)):
        is_rollout = False
    else:
        is_rollout = bool(old("algorithm.rollout_correction.bypass_mode"))
    return "rollout" if is_rollout else "old"


def evaluation_frequency(old: Old, row: Mapping[str, object]) -> int | None:
    """Return every how many steps the old run evaluated.

    None where it had no reason to look at held-out prompts.
    """
    key = "rollout.test_freq" if is_async(row) and release(row) < (0, 7, 1) else "trainer.test_freq"
    steps = max(0, int(number(old(key))))
    before = old("trainer.val_before_train")
    return steps if (steps or before or before is None) and old("data.val_files") else None


def runs_second_trainer(old: Old, row: Mapping[str, object]) -> bool:
    return (
        str(row["entry"]) == "verl.trainer.main_ppo"
        and release(row) >= (0, 9)
        and bool(old("trainer.use_v1"))
    )


def takes_generated_batch(old: Old, row: Mapping[str, object]) -> bool:
    """Check if a step had the batch of the data loader (ray_trainer.py, since v0.4.0)."""
    is_filtered = is_dapo(row) and bool(old("algorithm.filter_groups.enable"))
    is_first = release(row) >= (0, 4) and not runs_second_trainer(old, row)
    return is_first and not is_filtered and old("data.gen_batch_size") is not None


def filtering(old: Old, row: Mapping[str, object]) -> dict[str, object]:
    """Return the rounds of dynamic sampling.

    The second trainer of main_ppo (V1) sampled without a bound.
    """
    is_second = runs_second_trainer(old, row)
    is_read = is_dapo(row) or is_second
    if not old("algorithm.filter_groups.enable") or not is_read:
        return {"algorithm.dynamic_sampling.max_rounds": ABSENT}
    rounds = int(number(old("algorithm.filter_groups.max_num_gen_batches") or 0))
    return {"algorithm.dynamic_sampling.max_rounds": 1000 if is_second or rounds < 1 else rounds}


ABSENT = "absent"
"""Value for a block that the new configuration may lack."""


def optimisation(
    old: Old, row: Mapping[str, object], *, role: str, new: str, adam: Callable[[], object]
) -> dict[str, object]:
    """Clip, moments, decay and schedule of one role.

    None where the old engine's own default counted, or another optimizer ran.
    """
    optim, on_megatron = f"{role}.optim", is_on_megatron(row)
    is_adam = str(adam() or "adam").lower() in ("adam", "adamw")
    own_given = any(
        str(token).lstrip("+").startswith(f"{role}.grad_clip=") for token in row["overrides"]
    )  # type: ignore[attr-defined]
    later = release(row) >= (0, 8)
    clip = old(f"{optim}.clip_grad") if on_megatron or later else old(f"{role}.grad_clip")
    styles = (
        (old(f"{optim}.lr_decay_style"),)
        if on_megatron
        else (old(f"{optim}.warmup_style"), old(f"{optim}.lr_scheduler_type"))
    )
    kind = next(
        (style for style in styles if style is not None), None if on_megatron else "constant"
    )
    steps, ratio = old(f"{optim}.lr_warmup_steps"), old(f"{optim}.lr_warmup_steps_ratio")
    by_steps = steps is not None and (
        int(number(steps)) > 0 or (int(number(steps)) == 0 and not on_megatron)
    )
    decay = old(f"{optim}.weight_decay")
    result: dict[str, object] = {
        f"{new}.optimizer.clip_grad_norm": None if later and own_given else clip,
        f"{new}.optimizer.betas": (old(f"{optim}.betas") or [0.9, 0.999]) if is_adam else None,
        f"{new}.optimizer.weight_decay": 0.01 if decay is None else decay,
        f"{new}.schedule.kind": kind,
        f"{new}.schedule.warmup_ratio": 0.0 if by_steps or not ratio else ratio,
    }
    if kind == "cosine" and not on_megatron:
        result[f"{new}.schedule.min_lr_ratio"] = old(f"{optim}.min_lr_ratio") or 0.0
    return result


FIRST_RATE = "actor.engine.schedule: first step's share of the peak"
"""Derived from the warm-up: the old one began at 0, the new one at 1 / N."""

REASONS = {
    FIRST_RATE: (
        "the old warm-up started at rate 0; step k of N now has k / N of the peak, one step earlier"
    ),
    "run.eval_sampling.temperature": (
        "without held-out prompts there is no evaluation, so the key is not written"
    ),
    "algorithm.policy_loss.dual_clip": "only the vanilla loss has a dual clip",
    "algorithm.advantage.name": (
        "with only teachers as signal no advantage is estimated; a group of one keeps its "
        "unnormalized reward"
    ),
    "algorithm.policy_loss.clip_low": "gpg has no ratio to clip",
    "algorithm.policy_loss.clip_high": "the same",
}
"""The differences that are explained."""


def is_explained(key: str, old: Old, new: Mapping[str, object]) -> bool:
    if key == FIRST_RATE:
        return new.get(key) == 1 / number(new.get("actor.engine.schedule.warmup_steps"))
    if key == "run.eval_sampling.temperature":
        return "data.eval.paths" not in new
    if key == "algorithm.advantage.name":
        single = old("actor_rollout_ref.rollout.n") == 1 and str(new.get(key)).endswith(
            ":bare_reward"
        )
        return single or (
            bool(old("distillation.enabled"))
            and old("distillation.distillation_loss.use_task_rewards") is False
        )
    if key in ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high"):
        return ":" in str(new.get("algorithm.policy_loss.name", ""))
    return (
        key == "algorithm.policy_loss.dual_clip"
        and new.get("algorithm.policy_loss.name", "ppo") != "ppo"
    )


def comparable(row: Mapping[str, object]) -> bool:
    """Check that a run trains a policy, and that its values do not depend on the shell."""
    is_known = row["entry"] == "verl.trainer.main_ppo" or str(row["entry"]).endswith(
        tuple(OWN_CONFIGS)
    )
    return (
        is_known
        and "__ENV" not in str(row["overrides"])
        and "multiturn" not in str(row["config_name"])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One run's effective values, before and after."""

    tag: str
    path: str
    old: Mapping[str, object]
    """Expected values of the new run by the trainer's key; None is not compared."""
    new: Mapping[str, object]
    """Values of the new run for the same keys."""
    explained: frozenset[str]
    """Keys that differ for a reason of REASONS."""

    @property
    def unexplained(self) -> dict[str, tuple[object, object]]:
        """Keys that differ for none."""
        keys = [
            key
            for key, value in self.old.items()
            if value is not None and self.new[key] != value and key not in self.explained
        ]
        return {key: (self.old[key], self.new[key]) for key in keys}


def read_both(facts: Path, row: Mapping[str, object]) -> tuple[Old, dict[str, object]] | None:
    """Return the values of the old run and of its translation.

    None where a person has to decide first, or where Hydra cannot read a token, so that the old
    program did not start either.
    """
    translation = translate(
        row["overrides"],
        entry=str(row["entry"]),
        config_name=row["config_name"],
        version=str(row["tag"]),
    )  # type: ignore[arg-type]
    if any(finding.level == "person" for finding in translation.findings):
        return None
    try:
        old = old_effective(facts, row)
    except HydraException:
        return None
    return old, {**trainer_defaults(), **flatten(yaml.load(yaml_of(translation), yaml.CSafeLoader))}


def compare_one(facts: Path, row: Mapping[str, object]) -> Comparison | None:
    """Return the none where a person has to decide first, or Hydra cannot read a token."""
    values_of_row = read_both(facts, row)
    if values_of_row is None:
        return None
    old, new = values_of_row
    steps = number(new.get("actor.engine.schedule.warmup_steps"))
    new[FIRST_RATE] = 1 / steps if steps > 0 else 1.0
    is_rollout = new.get("algorithm.rollout_correction.name") == "rollout_ratio"
    new[DENOMINATOR] = "rollout" if is_rollout else "old"
    new.setdefault("algorithm.dynamic_sampling.max_rounds", ABSENT)
    expected = expectations(old, row)
    explained = frozenset(
        key
        for key, value in expected.items()
        if new.get(key) != value and is_explained(key, old, new)
    )
    result = {key: new.get(key) for key in expected}
    return Comparison(
        tag=str(row["tag"]), path=str(row["path"]), old=expected, new=result, explained=explained
    )


def compare(facts: Path, rows: list[dict[str, object]]) -> list[Comparison]:
    return [result for row in rows if (result := compare_one(facts, row)) is not None]


def wrong(result: list[Comparison]) -> dict[str, dict[str, tuple[object, object]]]:
    return {f"{item.tag} {item.path}": item.unexplained for item in result if item.unexplained}


def test_a_sample_over_all_releases_means_the_same(
    facts: Path, invocations: list[dict[str, object]]
) -> None:
    result = compare(facts, [row for row in invocations if comparable(row)][::29])
    assert wrong(result) == {}
    assert len(result) >= 12
    assert sum(len(item.old) for item in result) >= 12 * 24


KL_LOSS = f"{A}.use_kl_loss=True"
DPPO = (f"{A}.clip_ratio_low=0.15", f"{A}.clip_ratio_high=0.1", f"{A}.clip_ratio_c=20.0")
NEW_NAMES = {
    "v0.8.0": [
        *(
            (KL_LOSS, f"{A}.kl_loss_type={word}")
            for word in ("low_var_kl+", "k3+", "kl+", "k1+", "mse+", "k2+", "low_var_kl")
        ),
        ("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=low_var_kl+"),
        (
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_penalty=kl",
            KL_LOSS,
            f"{A}.kl_loss_type=k1+",
        ),
    ],
    "v0.9.0": [
        *((*DPPO, f"{A}.policy_loss.loss_mode={mode}") for mode in ("dppo_tv", "dppo_kl")),
        ("algorithm.adv_estimator=grpo_passk",),
        ("algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=False"),
        ("algorithm.adv_estimator=optimal_token_baseline", f"{A}.calculate_sum_pi_squared=True"),
        (
            "algorithm.adv_estimator=tir_optimal_token_baseline",
            f"{A}.calculate_sum_pi_squared=True",
        ),
        (f"{A}.loss_agg_mode=token-sum",),
        (f"{A}.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor=4096"),
    ],
}
"""Settings that hardly any recorded run has, by release."""
NEWER = [(tag, overrides) for tag, cases in NEW_NAMES.items() for overrides in cases]


@pytest.mark.parametrize(
    ("tag", "overrides"),
    NEWER,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_names_of_newer_algorithms_mean_the_same(
    tag: str, overrides: tuple[str, ...], facts: Path
) -> None:
    row = {
        "tag": tag,
        "path": "",
        "entry": "verl.trainer.main_ppo",
        "config_name": None,
        "overrides": [*BASE, *overrides],
    }
    comparison = compare_one(facts, row)
    assert comparison is not None
    assert comparison.unexplained == {}


@pytest.mark.parametrize("part", sorted(OWN_CONFIGS))
def test_a_sample_of_each_further_entry_means_the_same(
    part: str, facts: Path, invocations: list[dict[str, object]]
) -> None:
    rows = [row for row in invocations if comparable(row) and str(row["entry"]).endswith(part)]
    results = compare(facts, rows[::7])
    assert wrong(results) == {}
    assert len(results) >= 2


# Nightly: compares all runs. The tests above take a sample every day.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_core_run_means_the_same(facts: Path, invocations: list[dict[str, object]]) -> None:
    # With TEMPER_MEANING_PAGE=FILE it writes what it compared as a page; TEMPER_MEANING_EVERY=N
    # takes each Nth run alone.
    result = compare(
        facts,
        [row for row in invocations if comparable(row)][
            :: int(os.environ.get("TEMPER_MEANING_EVERY", "1"))
        ],
    )
    if page := os.environ.get("TEMPER_MEANING_PAGE"):
        # Tests run in an empty folder, so a relative path is one of the repository.
        path = Path(__file__).resolve().parents[4] / page
        path.write_text(meaning_page(result, reasons=REASONS), encoding="utf-8")
    assert wrong(result) == {}
    assert len(result) >= 60
