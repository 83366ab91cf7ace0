"""Around a run: find a learning rate, export, compress, fine-tune, judge and reproduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.help.lazy import lazy

if TYPE_CHECKING:
    from hocket_tools.finetuning.adapters import Adapters as Adapters, merge_adapters as merge_adapters
    from hocket_tools.finetuning.algorithm import Finetuning as Finetuning

__getattr__, __dir__ = lazy(__name__)
