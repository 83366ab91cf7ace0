"""Give a module of any class a new forward, and keep its class, its parameters and their names."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, TypeVar, cast

from torch import nn

from hocket.surgery import recast

ExtensionT = TypeVar("ExtensionT", bound="Extension")


class Extension(nn.Module):
    """The base of classes that override methods of another module class; `extended` makes the subclass of both."""

    #: This class and the class that it extends, in the classes that `extended` makes.
    parts: ClassVar[tuple[type[Extension], type[nn.Module]]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class exists only in this process, so pickles and copies name the two classes that it is made of.
        return (_empty, self.parts, *cast("tuple[Any, ...]", super().__reduce_ex__(protocol))[2:])


def extended(module: nn.Module, extension: type[ExtensionT]) -> ExtensionT:
    """Return ``module`` as an instance of a subclass of ``extension`` and of its own class.

    It has the same attributes, parameters, buffers and submodules (the same objects), and no forward or backward hooks:
    `hocket.surgery.replace_modules` moves those. It can be pickled and copied.
    """
    parts: tuple[Any, Any] = extension, type(module)
    new: ExtensionT = recast(module, _class_of(*parts))
    return new


@cache
def _class_of(extension: Any, base: Any) -> Any:
    return type(f"{base.__name__}{extension.__name__}", (extension, base), {"parts": (extension, base)})


def _empty(extension: Any, base: Any) -> Any:
    cls = _class_of(extension, base)
    return cls.__new__(cls)
