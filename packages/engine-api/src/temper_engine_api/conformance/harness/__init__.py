"""Rank processes, measurements and comparisons shared by the conformance tests."""
