"""Data sources, their order, and tokenization. Import from the submodules."""
