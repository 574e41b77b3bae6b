"""The roles of the old configurations: their blocks, and how many ranks they have."""

import math
from dataclasses import dataclass

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rows import fact, role_fact


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRole:
    name: str
    """actor, critic or ref."""
    block: str
    model: str
    """Its model block; the reference shares the actor's."""
    fsdp: tuple[str, ...]
    """Sharding blocks of the role; the first that exists counts."""
    is_trained: bool
    """True if it has an optimizer."""
    megatron: str = ""
    optim: str = ""
    ulysses: str = ""
    """A further key of the ranks that share a sequence."""

    @property
    def engine(self) -> str:
        return f"{self.name}.engine"

    def __str__(self) -> str:
        return self.name

    def blocks(self, draft: Draft) -> dict[str, "str | OldRole"]:
        """Return the role and its blocks, for rows that apply to several roles."""
        parent = "critic" if self.name == "critic" else _HYBRID
        fsdp = fsdp_block(draft, self)
        return {
            "role": self,
            "block": self.block,
            "engine": self.engine,
            "parent": parent,
            "model": self.model,
            "megatron": self.megatron,
            "optim": self.optim,
            "fsdp": fsdp,
            "sharding": self.megatron if is_megatron(draft) else fsdp,
        }


_HYBRID = "actor_rollout_ref"


def _make_ppo_role(
    name: str, block: str, *, model: str, fsdp: tuple[str, ...], is_trained: bool
) -> OldRole:
    return OldRole(
        name=name,
        block=block,
        model=model,
        fsdp=fsdp,
        is_trained=is_trained,
        megatron=f"{block}.megatron",
        optim=f"{block}.optim",
    )


ACTOR = _make_ppo_role(
    "actor",
    f"{_HYBRID}.actor",
    model=f"{_HYBRID}.model",
    fsdp=(f"{_HYBRID}.actor.fsdp_config",),
    is_trained=True,
)
REF = _make_ppo_role(
    "ref",
    f"{_HYBRID}.ref",
    model=f"{_HYBRID}.model",
    fsdp=(f"{_HYBRID}.ref.fsdp_config",),
    is_trained=False,
)
CRITIC = _make_ppo_role(
    "critic",
    "critic",
    model="critic.model",
    fsdp=("critic.fsdp", "critic.model.fsdp_config"),
    is_trained=True,
)
SFT = OldRole(
    name="actor",
    block="engine",
    model="model",
    fsdp=("engine",),
    is_trained=True,
    megatron="engine",
    optim="optim",
)
COLUMNS = OldRole(
    name="actor",
    block="model",
    model="model",
    fsdp=("model.fsdp_config",),
    is_trained=True,
    optim="optim",
    ulysses="ulysses_sequence_parallel_size",
)
CLUSTER_KEYS = ("trainer.nnodes", "trainer.n_gpus_per_node")


@fact
def world_size(draft: Draft) -> int | None:
    """Return the processes of the run: nodes times GPUs of each; None if it is not known."""
    if draft.cluster is not None:
        return max(1, draft.cluster.nodes * draft.cluster.gpus_per_node)
    if draft.old.family.startswith("sft") and not draft.old.is_set(*CLUSTER_KEYS):
        return None  # torchrun's numbers, which no configuration has
    nodes, gpus = draft.integer("trainer.nnodes"), draft.integer("trainer.n_gpus_per_node")
    if nodes is None and gpus is None:
        return None
    return max(1, (nodes or 1) * (gpus or 1))


@fact
def is_megatron(draft: Draft) -> bool:
    return draft.old.family.endswith("megatron")


def fsdp_block(draft: Draft, role: OldRole) -> str:
    return next((block for block in role.fsdp if draft.old.has(block)), role.fsdp[0])


@role_fact
def sequence_parallel(draft: Draft, role: OldRole) -> int:
    """Return the ranks that shared a sequence (Ulysses), as the release read it."""
    keys = ulysses_keys(role)
    result = [draft.integer(key) or 1 for key in keys if draft.old.has(key)]
    return max(result, default=1)


def ulysses_keys(role: OldRole) -> list[str]:
    """Return the keys that hold the number of ranks per sequence."""
    own = [role.ulysses] if role.ulysses else []
    return [
        *own,
        f"{role.block}.ulysses_sequence_parallel_size",
        *(f"{block}.ulysses_sequence_parallel_size" for block in role.fsdp),
    ]


def data_parallel(draft: Draft, role: OldRole) -> int | None:
    """Return the number of ranks with different samples."""
    world = world_size(draft)
    if world is None:
        return None
    return max(1, world // replica_size(draft, role))


def replica_size(draft: Draft, role: OldRole) -> int:
    """Return the ranks that hold one copy of the model and see the same samples."""
    if not is_megatron(draft):
        return sequence_parallel(draft, role)
    return math.prod(draft.integer(key) or 1 for key in megatron_sizes(role))


def megatron_sizes(role: OldRole) -> list[str]:
    return [f"{role.megatron}.{name}_model_parallel_size" for name in ("tensor", "pipeline")] + [
        f"{role.megatron}.context_parallel_size"
    ]
