"""Old launch scripts.

A static reader of bash that executes nothing, and a writer of scripts that launch ``temper-train``.

``parser`` makes a tree of a script's text, ``evaluator`` walks it with known values and symbolic
unknowns and records the commands that would run, ``launches`` finds old trainers among them,
``rewrite`` writes the new script.
"""
