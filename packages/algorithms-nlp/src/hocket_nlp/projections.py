"""Let a projection of a model, such as a Linear or a Conv1D of transformers, compute more, and keep its class and names."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket.surgery import recast

FinisherT = TypeVar("FinisherT", bound="Finisher")


class Finisher(nn.Module):
    """Base of classes that compute further with the output of a projection; `with_finish` makes the subclass of both."""

    def forward(self, input: Tensor) -> Tensor:
        return self.finish(input, super().forward(input))  # type: ignore[misc]  # of the projection's class

    def finish(self, input: Tensor, output: Tensor) -> Tensor:
        """Return the new output, given the input and the output of the projection."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class exists only in this process, so pickles and copies name the two that it is made of.
        return _empty, type(self).__bases__, self.__getstate__()

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # Conv1D has one of its own, without submodules


def refuse_adapters(model: nn.Module, what: str) -> None:
    """Raise ValueError for a model with adapters of peft, in whose folders and merged weights changes of others are lost."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise WrongValue(
            f"{what} was given a model with adapters, which peft saves and merges alone: the change would be lost. Train all "
            "weights, or change and train the model first, and give it adapters afterwards."
        )


def with_finish(projection: nn.Module, kind: type[FinisherT]) -> FinisherT:
    """Return ``projection`` as an instance of ``kind`` and of its own class, with the same parameters under the same names."""
    both: tuple[Any, Any] = kind, type(projection)
    made: FinisherT = recast(projection, _class_of(*both))
    return made


@cache
def _class_of(kind: Any, base: Any) -> Any:
    return type(f"{kind.__name__}{base.__name__}", (kind, base), {"__module__": __name__})


def _empty(kind: Any, base: Any) -> Any:
    made = _class_of(kind, base)
    return made.__new__(made)


def is_of_transformers(module: nn.Module, name: str) -> bool:
    """Whether it is an instance of this class of transformers, which is not imported to find out."""
    return any(kind.__name__ == name and kind.__module__.startswith("transformers.") for kind in type(module).__mro__)
