"""Old module paths for code that cannot be edited; they exist after ``install()``."""

import importlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType

from temper_legacy_shim.errors import UsageError

PACKAGE = "verl"
"""The import name of the older generation."""
_SHIM = "temper_legacy_shim"
_WORKERS = f"{_SHIM}.workers"
_FSDP = {
    name: f"{_WORKERS}.fsdp_workers:{name}"
    for name in ("ActorRolloutRefWorker", "AsyncActorRolloutRefWorker", "CriticWorker")
}
_ACTOR_BASE = {"BasePPOActor": f"{_WORKERS}.old_bases:BasePPOActor"}
_CRITIC_BASE = {"BasePPOCritic": f"{_WORKERS}.old_bases:BasePPOCritic"}
_ACTOR = {"DataParallelPPOActor": f"{_WORKERS}.ppo_actor:DataParallelPPOActor", **_ACTOR_BASE}
_CRITIC = {"DataParallelPPOCritic": f"{_WORKERS}.ppo_critic:DataParallelPPOCritic", **_CRITIC_BASE}
_MEGATRON_ACTOR = {
    "MegatronPPOActor": f"{_WORKERS}.megatron_workers:MegatronPPOActor",
    **_ACTOR_BASE,
}
_MEGATRON_CRITIC = {
    "MegatronPPOCritic": f"{_WORKERS}.megatron_workers:MegatronPPOCritic",
    **_CRITIC_BASE,
}
_PROTO = {
    name: f"{_SHIM}.data_proto:{name}"
    for name in ("DataProto", "DataProtoItem", "pad_dataproto_to_divisor", "unpad_dataproto")
}
_SCORES = f"{_SHIM}.old_scores"
_DEFAULT_SCORE = dict.fromkeys(
    ("default_compute_score", "_default_compute_score"), f"{_SCORES}:default_compute_score"
)
_MATH = {
    name: f"{_SCORES}:{name}"
    for name in ("is_equiv", "last_boxed_only_string", "remove_boxed", "strip_string")
}
_MATH["compute_score"] = f"{_SCORES}:math_score"
_GSM8K = {
    "compute_score": f"{_SCORES}:gsm8k_score",
    "extract_solution": f"{_SCORES}:extract_solution",
}
_HELPERS = f"{_SHIM}.old_helpers"
_FILES = {name: f"{_HELPERS}:{name}" for name in ("copy", "exists", "makedirs")}
_TENSORS = {
    name: f"{_HELPERS}:{name}"
    for name in ("pad_sequence_to_length", "postprocess_data", "tokenize_and_postprocess_data")
}
_TOKENIZER = {"hf_tokenizer": f"{_HELPERS}:hf_tokenizer"}

MODULES: dict[str, dict[str, str]] = {
    PACKAGE: {"DataProto": _PROTO["DataProto"]},
    f"{PACKAGE}.protocol": _PROTO,
    f"{PACKAGE}.tools": {},
    f"{PACKAGE}.tools.base_tool": {"BaseTool": f"{_SHIM}.old_tools:BaseTool"},
    f"{PACKAGE}.tools.schemas": {
        "OpenAIFunctionToolSchema": f"{_SHIM}.old_tools:ToolSchema",
        "ToolResponse": f"{_SHIM}.old_tools:ToolResponse",
    },
    f"{PACKAGE}.utils": _TOKENIZER,
    f"{PACKAGE}.utils.dataset": {},
    f"{PACKAGE}.utils.dataset.rl_dataset": {"collate_fn": f"{_HELPERS}:collate_fn"},
    f"{PACKAGE}.utils.fs": dict.fromkeys(
        ("copy_to_local", "copy_local_path_from_hdfs"), f"{_HELPERS}:copy_to_local"
    ),
    f"{PACKAGE}.utils.hdfs_io": _FILES,
    f"{PACKAGE}.utils.model": {
        "compute_position_id_with_mask": f"{_HELPERS}:compute_position_id_with_mask"
    },
    f"{PACKAGE}.utils.reward_score": _DEFAULT_SCORE,
    f"{PACKAGE}.utils.reward_score.gsm8k": _GSM8K,
    f"{PACKAGE}.utils.reward_score.math": _MATH,
    f"{PACKAGE}.utils.reward_score.math_reward": _MATH,
    f"{PACKAGE}.utils.tokenizer": _TOKENIZER,
    f"{PACKAGE}.utils.torch_functional": _TENSORS,
    f"{PACKAGE}.workers": {},
    f"{PACKAGE}.workers.fsdp_workers": _FSDP,
    f"{PACKAGE}.workers.megatron_workers": {
        **{name: f"{_WORKERS}.megatron_workers:{name}" for name in _FSDP},
        "MegatronWorker": f"{_WORKERS}.old_bases:MegatronWorker",
    },
    f"{PACKAGE}.workers.actor": _ACTOR,
    f"{PACKAGE}.workers.actor.base": _ACTOR_BASE,
    f"{PACKAGE}.workers.actor.dp_actor": _ACTOR,
    f"{PACKAGE}.workers.actor.megatron_actor": _MEGATRON_ACTOR,
    f"{PACKAGE}.workers.critic": _CRITIC,
    f"{PACKAGE}.workers.critic.base": _CRITIC_BASE,
    f"{PACKAGE}.workers.critic.dp_critic": _CRITIC,
    f"{PACKAGE}.workers.critic.megatron_critic": _MEGATRON_CRITIC,
}
"""Names of each old module, with the location here: ``module:name``."""


class OldModule(ModuleType):
    """A module of the old name; its classes are looked up when they are asked for."""

    def __init__(self, name: str, offers: dict[str, str]) -> None:
        super().__init__(
            name,
            f"Stands in for the {name} of the older generation, by temper_legacy_shim.install().",
        )
        self.__path__: list[str] = []
        self.__all__ = sorted(offers)
        self._offers = offers

    def __getattr__(self, name: str) -> object:
        if name not in self._offers:
            raise AttributeError(
                f"{self.__name__} has no {name!r} here: temper_legacy_shim.install() offers "
                f"{', '.join(self._offers) or 'only modules below it'}; see "
                "docs/migration/workers.md."
            )
        module, _, attribute = self._offers[name].partition(":")
        return getattr(importlib.import_module(module), attribute)


def install(*, force: bool = False) -> None:
    """Make old module paths importable in this process, with the deprecated classes.

    Args:
        force: also where the older package is installed or already imported, whose modules of these
            names are then hidden.

    Raises:
        UsageError: the older package is there, and ``force`` is False.
    """
    if is_installed():
        return
    imported = sorted(name for name in MODULES if name in sys.modules)
    if not force and (imported or importlib.util.find_spec(PACKAGE) is not None):
        where = "was already imported" if imported else "is installed here"
        raise UsageError(
            f"{PACKAGE} itself {where}, and its own classes would be hidden: uninstall it, or call "
            "install(force=True) before anything imports it."
        )
    for name, offers in MODULES.items():
        module = OldModule(name, offers)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def uninstall() -> None:
    """Remove the old paths; imported names stay usable."""
    for name in MODULES:
        if isinstance(sys.modules.get(name), OldModule):
            del sys.modules[name]


def is_installed() -> bool:
    """Check if ``install()`` was called."""
    return isinstance(sys.modules.get(PACKAGE), OldModule)
