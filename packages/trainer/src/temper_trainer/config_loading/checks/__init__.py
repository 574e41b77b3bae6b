"""Check the data, models, libraries and functions that a configuration refers to.

A run starts with some of these checks; ``temper-train --check`` does all of them.
"""
