"""What the kit's extra brings, and the sentence where it is not installed; without importing any of it."""

from importlib.util import find_spec

KIT = "temper_engine_api.conformance"
PLUGIN = f"{KIT}.plugin"

NEEDS = ("numpy", "peft", "pytest", "safetensors", "transformers")
"""Modules of the extra ``conformance``."""


def missing_extra() -> str:
    """A sentence about modules of the extra that are not installed; empty where all are."""
    missing = [module for module in NEEDS if find_spec(module) is None]
    if not missing:
        return ""
    return f"the conformance kit needs {', '.join(missing)}, not installed here: pip install 'temper-engine-api[conformance]'."
