"""Groups of laws: the tests of one file each, and whether an engine may be called conforming without them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Laws about one thing: the tests of one file."""

    about: str
    """A line for the report."""
    is_mandatory: bool = True
    """Whether an engine can be called conforming without having been held to it."""


GROUPS = {
    "gradient": Group(about="one loss and one gradient, however the mini-batch is split"),
    "update": Group(about="AdamW, clipping, schedules, and updates that must not happen"),
    "logprob": Group(about="log-probs and entropies, packed, tempered, in float32"),
    "value": Group(about="values and scores", is_mandatory=False),
    "batch": Group(about="plans are executed, order and samples are kept"),
    "checkpoint": Group(about="resume, damage, retention, other world sizes"),
    "weights": Group(about="export and load under Hugging Face names, the portable state"),
    "adapter": Group(
        about="low-rank adapters: trained, switched off, merged, exchanged with PEFT",
        is_mandatory=False,
    ),
    "expert_adapter": Group(
        about="low-rank adapters inside experts, exchanged with PEFT", is_mandatory=False
    ),
    "state_machine": Group(about="calls in an order without meaning are refused"),
    "rfc_loop": Group(about="the RFC's training loop as users write it"),
    "residency": Group(about="moving and offloading change no number", is_mandatory=False),
    "capability": Group(about="what is not claimed is refused"),
}
