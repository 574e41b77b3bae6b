"""From a prompt and the text of a completion to a number. Import from the submodules."""
