"""Looks over a project folder.

``examination`` finds what an older system left there and plans its migration, ``steps`` carries it
out.
"""
