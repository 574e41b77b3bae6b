"""Tiny models and adapters, ragged batches and probe objectives of the conformance tests."""
