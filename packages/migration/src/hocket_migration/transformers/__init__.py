"""transformers' Trainer, run by hocket: ``from hocket_migration.transformers import Trainer``.

Names are imported when they are first used, and transformers with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.help.lazy import Absent, lazy

if TYPE_CHECKING:
    from hocket_migration.transformers.arguments import configuration
    from hocket_migration.transformers.seq2seq import Seq2SeqTrainer
    from hocket_migration.transformers.trainer import Trainer

#: Public name -> the module that defines it.
_PUBLIC = {"Seq2SeqTrainer": "seq2seq", "Trainer": "trainer", "configuration": "arguments"}

__all__ = ["Seq2SeqTrainer", "Trainer", "configuration"]

_imported, __dir__ = lazy(__name__, _PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise Absent(__name__, name, sorted(_PUBLIC))
    from hocket_migration.transformers.required_libraries import require

    require("transformers", "accelerate")
    return _imported(name)
