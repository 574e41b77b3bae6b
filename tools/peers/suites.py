"""The test files of other projects that run against our algorithms, and what they replace."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Test files of one project."""

    repository: str
    """URL of the project."""
    files: tuple[str, ...]
    """Paths below the checkout."""
    replaced: Mapping[str, Mapping[str, str | None]]
    """Import path of the adapter by module and function; None where we have no counterpart."""
    replaced_in_tests: Mapping[str, str | None] = field(default_factory=dict)
    """The same by name, for test files that load their own copy of a module."""
    stubs: tuple[str, ...] = ()
    """Modules that the project imports, but that these tests do not use; they are not installed."""
    deselected: tuple[str, ...] = ()
    """Ids, or their beginnings, of tests that do not run: they need processes of Ray, or test only
    the project's own registries."""
    arguments: tuple[str, ...] = ()
    """More arguments of pytest."""


def _adapt(module: str, *names: str) -> dict[str, str | None]:
    return {name: f"tools.peers.{module}:{name}" for name in names}


def _leave_out(*names: str) -> dict[str, str | None]:
    return dict.fromkeys(names)


_SKYRL_TESTS = "tests/backends/skyrl_train/utils/test_ppo_utils.py"

SUITES: dict[str, Suite] = {
    "verl": Suite(
        repository="https://github.com/volcengine/verl",
        files=tuple(
            f"tests/trainer/ppo/test_{name}.py"
            for name in (
                "core_algos_on_cpu",
                "dynamic_policy_losses_on_cpu",
                "loss_aggregation_on_cpu",
                "reinforce_pp_multiturn_on_cpu",
                "rollout_corr",
                "rollout_corr_integration",
                "value_loss_normalization_on_cpu",
            )
        ),
        replaced={
            "verl.trainer.ppo.core_algos": {
                **_adapt(
                    "verl_adapters",
                    "agg_loss",
                    "compute_gae_advantage_return",
                    "compute_grpo_outcome_advantage",
                    "compute_policy_loss_vanilla",
                    "compute_reinforce_plus_plus_outcome_advantage",
                    "compute_rloo_outcome_advantage",
                    "compute_value_loss",
                    "kl_penalty",
                ),
                **_leave_out("compute_policy_loss_dro", "get_adv_estimator_fn", "register_adv_est"),
            },
            "verl.trainer.ppo.rollout_corr_helper": {
                **_adapt(
                    "verl_adapters",
                    "compute_offpolicy_metrics",
                    "compute_rollout_correction_and_rejection_mask",
                ),
                **_leave_out("compute_is_metrics"),
            },
        },
    ),
    "slime": Suite(
        repository="https://github.com/THUDM/slime",
        files=("tests/test_cispo_loss.py", "tests/test_policy_loss.py"),
        replaced={
            "slime.utils.ppo_utils": _adapt(
                "slime_adapters", "compute_cispo_loss", "compute_policy_loss"
            )
        },
    ),
    "openrlhf": Suite(
        repository="https://github.com/OpenRLHF/OpenRLHF",
        files=("tests/test_loss_aggregation.py",),
        replaced={},
        stubs=("deepspeed", "deepspeed.comm", "deepspeed.runtime", "deepspeed.runtime.zero"),
        replaced_in_tests=_adapt("openrlhf_adapters", "PolicyLoss", "aggregate_loss"),
    ),
    "skyrl": Suite(
        repository="https://github.com/NovaSky-AI/SkyRL",
        files=(
            _SKYRL_TESTS,
            "tests/train/algorithms/test_losses.py",
            "tests/train/algorithms/test_off_policy_correction.py",
        ),
        stubs=(
            *("skyrl_gym", "skyrl_gym.envs", "skyrl_gym.envs.search", "skyrl_gym.envs.search.env"),
            *("skyrl_gym.envs.sql", "skyrl_gym.envs.sql.env"),
            "skyrl.backends.backend",  # needs Python 3.12
        ),
        replaced={
            "skyrl.backends.skyrl_train.utils.ppo_utils": _adapt(
                "skyrl_adapters",
                "AdaptiveKLController",
                "apply_loss_reduction_to_advantages_minibatch",
                "compute_approx_kl",
                "compute_gae_advantage_return",
                "compute_grpo_outcome_advantage",
                "compute_maxrl_advantage",
                "compute_reinforce_plus_plus_outcome_advantage",
                "compute_rloo_outcome_advantage",
                "reduce_loss",
            )
            | _adapt("skyrl_losses", "PolicyLossRegistry"),
            "skyrl.backends.skyrl_train.utils.off_policy_correction_utils": _adapt(
                "skyrl_losses",
                "compute_off_policy_correction",
                "compute_outlier_token_mask",
                "compute_sequence_mask",
                "compute_tis_ratio",
                "compute_token_mask",
            ),
        },
        deselected=tuple(
            f"{_SKYRL_TESTS}::test_{name}"
            for name in (
                "fixed_kl_controller",
                "base_",
                "advantage_estimator_registry",
                "policy_loss_registry",
                "registry_",
            )
        ),
        # The conftest starts Ray.
        arguments=("--noconftest",),
    ),
    "areal": Suite(
        repository="https://github.com/inclusionAI/AReaL",
        files=("tests/test_functional.py",),
        stubs=("aiofiles", "aiofiles.os"),
        replaced={
            "areal.utils.functional": _adapt("areal_adapters", "ppo_actor_loss_fn", "sapo_loss_fn")
        },
    ),
}
