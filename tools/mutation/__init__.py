"""Test whether the conformance kit detects changes of FSDPEngine's arithmetic; see __main__.py."""
