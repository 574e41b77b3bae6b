"""Change old imports in Python code.

``codemod`` changes a file's text, ``successors`` is the table.
"""
