"""Algorithms of hocket that a LightningModule leaves nothing to act on, because ``training_step`` computes its loss itself."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.basics.plugin_errors import PlanError
from hocket.hookspecs import Event
from hocket.hookspecs.bus import BusLike

#: What to write in ``training_step`` instead, by the name of an algorithm.
INSTEAD: Mapping[str, str] = {
    "mixup": "x, targets = hocket_vision.functional.mixup(x, y); loss = targets.loss(F.cross_entropy, self(x))",
    "cutmix": "x, targets = hocket_vision.functional.cutmix(x, y); loss = targets.loss(F.cross_entropy, self(x))",
    "label-smoothing": "loss = F.cross_entropy(logits, y, label_smoothing=0.1)",
    "selective-backprop": "losses = F.cross_entropy(self(x), y, reduction='none'); "
    "chosen = hocket_general.functional.select_using_loss(losses); x, y = x[chosen], y[chosen]",
    "z-loss": "loss = loss + hocket_nlp.functional.z_loss(logits, y)",
}


def refuse(bus: BusLike, module: str) -> None:
    """Raise PlanError for an algorithm that acts between the model's outputs and the loss of a module of this name."""
    acting = {*bus.listeners(Event.BEFORE_LOSS.value), *bus.listeners("loss", wrappers=False)}
    for each in bus.attachments:
        if each.kind == "algorithms" and (each in acting or each.name in INSTEAD):
            write = INSTEAD.get(each.name, "the loss that it would make")
            raise PlanError(
                f"Algorithm '{each.name}' acts between the model's outputs and the loss, and training_step of {module} "
                f"computes both. Remove '{each.name}', and write in training_step: {write}"
            )
