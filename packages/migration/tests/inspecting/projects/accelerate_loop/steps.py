from __future__ import annotations

from accelerate.logging import get_logger  #: maps

logger = get_logger(__name__)  #: maps


def evaluate(helper, model, loader):
    for batch in loader:
        found = helper.gather_for_metrics(model(batch))  #: maps
        helper.print(found.mean())  #: maps
    helper.wait_for_everyone()  #: maps
    helper.autocast()  #: changes
    return helper.launch_rockets()  #: none


class Loop:
    def __init__(self, helper: Accelerator | None = None):
        from accelerate import Accelerator  #: maps

        self.helper = helper or Accelerator(cpu=True)  #: maps

    def run(self, loss):
        self.helper.backward(loss)  #: maps


# ruff: noqa
