"""Build the documentation site from the repository's pages and pages generated from sources."""
