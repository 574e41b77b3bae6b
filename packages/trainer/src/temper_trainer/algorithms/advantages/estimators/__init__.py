"""Advantage estimators: settings and formula of each.

Every module of this folder is imported, so that its estimators are registered. None may import
torch at the top: see ``temper_trainer.settings.lazy_torch``.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
