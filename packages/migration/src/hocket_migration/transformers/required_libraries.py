"""Check that transformers is installed before the modules that need it import it."""

from __future__ import annotations

import importlib

from hocket.errors import MissingPackage
from hocket.help import installing


def require(*modules: str) -> None:
    """Import transformers, and other modules that its Trainer needs.

    Raises ModuleNotFoundError, with what to type, if one is not installed.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise  # a broken installation
            raise MissingPackage(
                f"hocket_migration.transformers needs the package {module}, which is not installed. Type: "
                f"{installing.command('transformers', 'hocket-migration')}.",
                name=module,
            ) from None
