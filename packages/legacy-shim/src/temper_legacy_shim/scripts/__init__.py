"""Old launch scripts.

A static reader of bash executes nothing, and a writer makes scripts that launch ``temper-train``.

``parser`` makes a tree of a script's text, ``evaluator`` walks it with known values and symbolic
unknowns and records the commands that would run, ``launches`` finds old trainers among them,
``rewrite`` writes the new script.
"""
