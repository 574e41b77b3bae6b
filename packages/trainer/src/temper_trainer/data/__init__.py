"""Where problems come from, the order they are handed out in, and how they become tokens. Import from the submodules."""
