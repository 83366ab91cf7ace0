"""``hocket_tools.tune``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from hocket.errors import WrongValue
from hocket.run import same_on_ranks
from hocket_tools.arguments import checked

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer
    from hocket_tools.tuning.batch_size_finder import BatchSize
    from hocket_tools.tuning.lr_finder import LearningRates


@overload
def tune(
    trainer: Trainer, what: Literal["lr"], *, low: float = ..., high: float = ..., steps: int = ..., run_steps: int = ...,
    progress: Callable[[str, int, int], None] = ...,
) -> LearningRates: ...  # fmt: skip
@overload
def tune(
    trainer: Trainer,
    what: Literal["batch_size"],
    *,
    limit: int | None = None,
    progress: Callable[[str, int, int], None] = ...,
) -> BatchSize: ...
@checked
def tune(
    trainer: Trainer, what: Literal["lr", "batch_size"], *, low: float = 1e-7, high: float = 1e3, steps: int = 100,
    run_steps: int = 40, limit: int | None = None, progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> LearningRates | BatchSize:  # fmt: skip
    """Search for a learning rate or a batch size by steps on trial. Every rank has to call it; all get the same result.

    The steps are those of `Trainer.fit`, with its microbatches, accumulation, precision, strategy and algorithms, on the
    training data from the beginning of an epoch. Schedules do nothing, and loggers, checkpoints and callbacks that only
    observe are not called. Afterwards everything in memory is bitwise as before, after an exception or Control-C too: weights,
    buffers, gradients, optimizers, schedules, generators of random numbers, the position in the data, and what plug-ins,
    the model and the loss function remember. Nothing is written. Nothing of this is changed in the Trainer: write the
    result into its arguments.

    ``"lr"``: for one optimizer after another, a range test (Smith 2017, arXiv:1506.01186, section 3.3) raises the learning
    rate exponentially in each step until the loss diverges. It shows where the model learns, which is a range of a factor of
    100 and more. Short runs at constant rates, each from the same weights and with the same batches, then descend to the rate
    with the lowest loss. Groups keep the proportions of their rates; other optimizers keep their rates.

    ``"batch_size"``: forward and backward with ever larger batches, first doubled and then bisected, until memory runs out, as
    ``microbatch="auto"`` does for parts of a batch. Larger batches repeat the samples of the first batch.

    Args:
        what: ``"lr"`` or ``"batch_size"``.
        low, high: of the learning rates.
        steps: of the range test.
        run_steps: of a short run, of which there are about 6, at most 12; 0 for none, which is faster and less certain.
        limit: samples of the largest batch to try on each rank; by default those of an epoch.
        progress: called with what is done, the number of its steps and of all.

    Raises:
        ValueError: there is no optimizer or no training data that can be iterated again; an argument is wrong, or an
            option of the other search; for ``"batch_size"``, the strategy shards parameters.
        RuntimeError: a fit is running.
        torch.OutOfMemoryError: not even one sample fits.
        ImportError: ``"batch_size"`` without hocket-algorithms-general.

    Example:
        >>> import hocket, hocket_tools, torch
        >>> data = [(torch.randn(8, 4), torch.randn(8, 1))] * 4
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss="mse_loss", optimizer="sgd(lr=0.1)", train_data=data, device="cpu"
        ... )
        >>> print(hocket_tools.tune(trainer, "batch_size", limit=24))
        batch size: 24
          because 24 samples fit in memory at once; larger batches were not tried; a batch has 8 now. Write batch_size=24 in ...
    """
    from hocket_tools.tuning.trial import check

    of_rates: dict[str, Any] = {"low": low, "high": high, "steps": steps, "run_steps": run_steps}
    for name, value in ({"limit": limit} if what == "lr" else of_rates).items():
        if value != inspect.signature(tune).parameters[name].default:
            raise WrongValue(f"«{name}={value!r}» has no effect on tune(trainer, {what!r}, …). Remove it.", about=name)
    options, state = of_rates | {"limit": limit, "what": what}, trainer.state
    given = {f"tune({name})": value for name, value in options.items()}
    same_on_ranks.over_ranks(state.bus, state.strategy.world_size, same_on_ranks.of_values(given))
    check(trainer)
    if what == "batch_size":
        from hocket_tools.tuning import batch_size_finder

        return batch_size_finder.find(trainer, limit=limit, progress=progress)
    from hocket_tools.tuning import lr_finder

    return lr_finder.find(trainer, **of_rates, progress=progress)
