"""Call the hooks of a LightningModule and of Lightning's callbacks, in Lightning's order: callbacks first, then the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Hooks:
    """The hooks of one module and its callbacks.

    Args:
        module: the LightningModule.
        trainer: the first argument of callbacks, which has their list.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        self._module, self._trainer = module, trainer

    @contextmanager
    def named(self, hook: str) -> Iterator[None]:
        """Let ``self.log`` know the hook inside the context."""
        before, self._module._current_fx_name = self._module._current_fx_name, hook
        try:
            yield
        finally:
            self._module._current_fx_name = before

    def module(self, hook: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a hook of the module."""
        with self.named(hook):
            return getattr(self._module, hook)(*arguments, **keywords)

    def callbacks(self, hook: str, *arguments: Any, monitoring: bool | None = None, **keywords: Any) -> None:
        """Call a hook of all callbacks, or only of those that monitor metrics, or of the others."""
        with self.named(hook):
            for callback in self._trainer.callbacks:
                if monitoring is None or monitoring == self._trainer.monitors(callback):
                    getattr(callback, hook)(self._trainer, self._module, *arguments, **keywords)

    def both(self, hook: str, *arguments: Any) -> Any:
        """Call a hook of the callbacks, then of the module, and return what the module's returned."""
        self.callbacks(hook, *arguments)
        return self.module(hook, *arguments)
