"""Help for users of older worker-class systems: the command ``temper-migrate``, checkpoint converters, deprecated workers.

Import from the rooms (``temper_legacy_shim.checkpoints``, ``.workers``): this file imports nothing, so that the command starts at once.
"""
