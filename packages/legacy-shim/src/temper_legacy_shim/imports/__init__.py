"""Change old imports in Python code: ``codemod``, with the table in ``successors``."""
