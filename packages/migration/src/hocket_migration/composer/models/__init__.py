"""Composer's ``composer.models``."""

from __future__ import annotations

from hocket.help.lazy import lazy

_PUBLIC = {"ComposerModel": "base", "ComposerClassifier": "tasks", "HuggingFaceModel": "huggingface"}

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
