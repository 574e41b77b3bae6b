"""The documentation site: the repository's pages as they are, and pages generated from the sources."""
