"""The model and the data of a custom loop, prepared by `hocket.Runtime`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.data import batches, nesting
from hocket.data.source import set_epoch

if TYPE_CHECKING:
    from hocket.runtime import Runtime


class PreparedModel(nn.Module):
    """A model prepared by `Runtime.setup`; ``module`` is the original model."""

    def __init__(self, runtime: Runtime, given: nn.Module, prepared: nn.Module) -> None:
        super().__init__()
        self.module = given
        self._bus, self._gradients = runtime.bus, runtime._gradients
        vars(self)["_prepared"] = prepared  # not registered as a submodule, which would duplicate the parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the prepared model under the precision's context, and convert 16-bit outputs to float32."""
        module = vars(self)["_prepared"]
        if self._gradients.stepping is module:  # within a step, which prepares its loss function in the same way
            module = self.module
        with self._bus.forward_context():
            outputs = module(*args, **kwargs)
        return nesting.map_tensors(self._convert_output, outputs)

    def _convert_output(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in _HALF:
            tensor = tensor.float()
        if tensor.grad_fn is not None:  # otherwise it may be a parameter, which would accumulate hooks
            tensor.register_hook(self._gradients.gate)
        return tensor


_HALF = (torch.float16, torch.bfloat16)


class PreparedData:
    """Iterate over the batches of this rank, on its device.

    A rank without a slice of a batch repeats a batch as padding, with ``samples`` 0: in training, where `Runtime.backward`
    gives it weight 0, and in evaluation under strategies whose ranks compute together, such as fsdp.
    """

    def __init__(self, runtime: Runtime, data: Iterable[Any], train: bool) -> None:
        self._runtime, self._data, self._train = runtime, data, train
        self._current: tuple[Any, bool] = (None, False)

    @property
    def samples(self) -> int:
        """Number of real samples in the current batch on this rank; 0 for a padding batch."""
        batch, counts = self._current
        return batches.count(batch).samples if counts else 0

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # len() raises TypeError if the data has no length

    def __iter__(self) -> Iterator[Any]:
        runtime = self._runtime
        for batch in self._data:
            self._current = batch, counts = batches.unpadded(batch)
            if self._train:
                mine = self.samples
                runtime._gradients.batch = (mine, runtime._sum(mine))
            elif not counts:
                warnings.warn(_REPEATED, stacklevel=2)
            yield runtime.bus.convert_batch(nesting.move(batch, runtime.device))
            runtime.device_kind.batch_end()

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of samplers and data sets that define it."""
        set_epoch(self._data, epoch)


_REPEATED = (
    "This rank has no slice of the batch and repeats a batch as padding, because all ranks have to compute. Weight results by "
    "`data.samples` of the object that setup_data returned: it is 0 for a padding batch."
)


def inner(model: nn.Module) -> nn.Module:
    """Return the module that the strategy prepared, of the model that `Runtime.setup` returned."""
    prepared: nn.Module = vars(model)["_prepared"] if isinstance(model, PreparedModel) else model
    return prepared
