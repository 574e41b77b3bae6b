"""The conformance kit: laws that every engine is held to, and an oracle to compare it with.

``python -m pytest --pyargs temper_engine_api.conformance --engine NAME --world-sizes 1,2 --layouts all`` runs it; so does
``python -m temper_engine_api.conformance``. It needs the extra ``temper-engine-api[conformance]``; this file imports nothing.
"""
