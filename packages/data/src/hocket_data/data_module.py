"""All data of a run as one object."""

from __future__ import annotations

from typing import Any

from hocket.errors import Unsupported


class DataModule:
    """All data of a run as one object. Subclass it, define :meth:`train`, and others as needed; see `hocket.Trainer`.

    The Trainer calls :meth:`prepare` and :meth:`setup` once, when a fit, an evaluation or a prediction first needs data, and
    after that the method for that data. `Trainer.plan` and the constructor call nothing.

    **Random numbers.** Each method begins with global generators seeded by the Trainer's ``seed``, and identical on all
    ranks and in a resumed run. The generators are restored afterwards, so what a method draws does not change training.

    Example:
        >>> import hocket, torch
        >>> class Sums(hocket.data.DataModule):
        ...     def __init__(self, batch_size: int = 8):
        ...         self.batch_size = batch_size
        ...     def setup(self):
        ...         inputs = torch.randn(80, 4)
        ...         both = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        ...         self.first, self.rest = torch.utils.data.random_split(both, [64, 16])
        ...     def train(self):
        ...         return torch.utils.data.DataLoader(self.first, self.batch_size, shuffle=True)
        ...     def eval(self):
        ...         return {"test": torch.utils.data.DataLoader(self.rest, self.batch_size)}
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), data=Sums(), loss="mse_loss", optimizer="sgd(lr=0.1)", seed=1, device="cpu"
        ... )
        >>> sorted(trainer.fit("5ep").metrics)
        ['test/loss', 'train/loss']
    """

    def prepare(self) -> None:
        """Download and convert files. One rank of each machine calls it, while the others wait.

        What it assigns to ``self`` is missing on the other ranks; :meth:`setup` reads the files instead. An error is raised
        on all ranks. The other ranks wait no longer than the strategy's ``timeout``.
        """

    def setup(self) -> None:
        """Make the data sets. Every rank calls it, after :meth:`prepare`."""

    def train(self) -> Any:
        """Return the training data: anything that ``train_data=`` of the Trainer takes."""
        return None

    def eval(self) -> Any:
        """Return the evaluation data: anything that ``eval_data=`` of the Trainer takes; None for no evaluation."""
        return None

    def predict(self) -> Any:
        """Return the data of `Trainer.predict` without an argument: any iterable of batches."""
        return None

    def extra_state(self) -> Any:
        """Return state to save in checkpoints, in the form of `hocket.Task.extra_state`, for each rank."""
        return None

    def load_extra_state(self, state: Any) -> None:
        """Restore the state that :meth:`extra_state` returned, after :meth:`setup` and before any data is made."""
        raise Unsupported(f"{type(self).__name__} needs a load_extra_state(state)")
