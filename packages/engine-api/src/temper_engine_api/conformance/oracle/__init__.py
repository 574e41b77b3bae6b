"""The oracle: a plain-torch engine that other engines are compared with."""

from temper_engine_api.conformance.oracle.oracle_engine import OracleEngine

__all__ = ["OracleEngine"]
