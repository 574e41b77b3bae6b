"""The conformance tests, one file per group."""
