"""The conformance kit: laws that every engine is held to, and an oracle to compare it with.

``python -m pytest --pyargs temper_engine_api.conformance --engine NAME --world-sizes 1,2 --layouts all`` runs it; so does
``python -m temper_engine_api.conformance``. It needs the extra ``temper-engine-api[conformance]``; this file imports nothing.
"""

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
