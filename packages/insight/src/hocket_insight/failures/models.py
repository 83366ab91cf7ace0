"""Models that another library trains, and arguments of a Trainer that are lists of names."""

from __future__ import annotations

from torch import nn

from hocket.basics.short_repr import short
from hocket.basics.types import Where
from hocket.errors import WrongType
from hocket.help import names
from hocket.state.task import Task


def check_arguments(model: nn.Module, loss: object, inputs: Where, targets: Where, outputs: Where) -> None:
    """Raise TypeError for a module that another library trains, or for several names in one of these arguments."""
    if loss is None:
        check_foreign(model)
    for name, given in (("inputs", inputs), ("targets", targets), ("outputs", outputs)):
        if isinstance(given, list | set):
            whole = "output" if name == "outputs" else "batch"
            parts = ", ".join(f"{whole}[{key!r}]" for key in given)
            omit = (
                f" From a dict a model gets the entries by name: omit «inputs=», and write def forward(self, "
                f"{', '.join(map(str, given))}, **others)."
            )
            raise WrongType(
                f"{name}={short(given)} is a {type(given).__name__}; it should be one name, one index or a function. Write "
                f"{name}=lambda {whole}: ({parts}), which passes on one tuple.{omit if name == 'inputs' else ''}"
            )


def check_foreign(model: nn.Module) -> None:
    """Raise TypeError for a model whose loss is in a method that another library calls."""
    kind = type(model)
    foreign = [(method, library) for method, library in names.table("steps").items() if hasattr(kind, method)]
    if not foreign:
        return
    method, library = foreign[0]
    runs = "Write"
    if library == "Lightning" and hasattr(kind, "training_step") and not isinstance(model, Task):
        from hocket.help import installing  # only needed for error messages

        runs = (
            f"hocket_migration runs it as it is: «model=hocket_migration.lightning.LightningTask({kind.__name__}(…))»; "
            f"{installing.command('lightning', 'hocket-migration')}. Or write"
        )
    library = names.library(model) or library
    raise WrongType(
        f"{kind.__name__} has {method}(), which belongs to another library ({library}) and is not called here. {runs} a "
        "hocket.Task with forward(self, batch) and loss(self, outputs, batch) instead; a task of several steps has "
        "train_batch(self, batch, step). Or give the inner torch.nn.Module and «loss=»."
    )
