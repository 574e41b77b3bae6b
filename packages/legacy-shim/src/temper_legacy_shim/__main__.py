"""``python -m temper_legacy_shim`` is the command ``temper-migrate``."""

from temper_legacy_shim.cli import main

if __name__ == "__main__":
    main()
