"""The probe objectives as parameters of a law, each with what an engine must claim to be held to it."""

import pytest

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.probes import PROBES
from temper_engine_api.objective import Objective, Query

_CLAIMS = {Query.VALUE: Capability.VALUE_MODEL, Query.LOGPROB_AT: Capability.LOGPROB_AT}


def _parameter(probe: Objective) -> object:
    needed = [_CLAIMS[query] for query in sorted(probe.needs) if query in _CLAIMS]
    return pytest.param(probe, id=probe.name, marks=pytest.mark.claims(*needed))


every_probe = pytest.mark.parametrize("probe", [_parameter(probe) for probe in PROBES])
"""Decorator: the law runs once for each of the six."""
