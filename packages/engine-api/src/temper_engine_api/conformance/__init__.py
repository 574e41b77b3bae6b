"""The conformance kit: tests that every engine must pass, with an oracle to compare it to.

Run it with
``python -m pytest --pyargs temper_engine_api.conformance --engine NAME --world-sizes 1,2``
or ``python -m temper_engine_api.conformance``. It needs the extra
``temper-engine-api[conformance]``; this file imports none of its modules.
"""

from importlib.util import find_spec

from temper_engine_api.errors import format_install

KIT = "temper_engine_api.conformance"
PLUGIN = f"{KIT}.plugin"

NEEDS = ("numpy", "peft", "pytest", "safetensors", "transformers")
"""Modules of the extra ``conformance``."""


def describe_missing_extra() -> str:
    """Return a message that names missing modules from the extra; empty if all are installed."""
    missing = [module for module in NEEDS if find_spec(module) is None]
    if not missing:
        return ""
    return (
        f"the conformance kit needs {', '.join(missing)}, which are not installed: "
        f"{format_install('temper-engine-api[conformance]')}."
    )
