"""Old imports in Python code, and what they become.

``codemod`` changes a file's text, ``successors`` is the table.
"""
