"""Help for users of older worker-class systems.

It has the command ``temper-migrate``, converters of checkpoints, and the deprecated workers.

Import from the packages (``temper_legacy_shim.checkpoints``, ``.workers``): this file imports
nothing, so that the command starts at once. ``install()`` puts the deprecated workers under their
old module paths.
"""


def install(*, force: bool = False) -> None:
    """Make old module paths importable, with the deprecated classes; see ``old_paths.install``."""
    from temper_legacy_shim import old_paths

    old_paths.install(force=force)
