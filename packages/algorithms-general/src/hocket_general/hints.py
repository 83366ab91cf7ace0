"""Hints: match outputs of inner modules of a student with those of its teacher.

Source: Romero et al. 2015, "FitNets: Hints for Thin Deep Nets", arXiv 1412.6550, equation 3, for features of equal shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.errors import WrongValue


class Hints:
    """Record the features of both models in each forward pass.

    Args:
        names: the names of the student's modules, with those of the teacher's modules to match.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        #: The features of the current microbatch by the student's names, and the hooks that record them.
        self._student: dict[str, Tensor] = {}
        self._taught: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self.names)

    def check(self, student: nn.Module, teacher: nn.Module) -> None:
        """Raise ValueError for the name of a module that a model does not have."""
        for name, taught in self.names.items():
            _check_name(student, name, "model")
            _check_name(teacher, taught, "teacher")

    def record(self, student: nn.Module, teacher: nn.Module) -> None:
        """Record the features of these models from now on."""
        self.end()
        for name, taught in self.names.items():
            self._hooks += [
                student.get_submodule(name).register_forward_hook(partial(_record, self._student, name)),
                teacher.get_submodule(taught).register_forward_hook(partial(_record, self._taught, name)),
            ]

    def end(self) -> None:
        """Record no longer, and drop all features."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._student.clear()
        self._taught.clear()

    def begin_forward(self) -> None:
        """Drop the student's features of the previous forward pass."""
        self._student.clear()

    def loss(self) -> Tensor:
        """Return the sum over modules of the mean squared difference of their features.

        Raises ValueError for missing features, or shapes that differ.
        """
        hints = []
        for name, teacher_name in self.names.items():
            student, teacher = self._student.pop(name, None), self._taught.pop(name, None)
            if student is None or teacher is None:
                who, module = ("model", name) if student is None else ("teacher", teacher_name)
                raise WrongValue(
                    f"Distillation found no tensor that the {who}'s module {module!r} returned in this batch. Name a module "
                    "that is called in every forward pass and returns a tensor."
                )
            if student.shape != teacher.shape:
                raise WrongValue(
                    f"The features of the model's {name!r} have shape {tuple(student.shape)} and those of the teacher's "
                    f"{teacher_name!r} {tuple(teacher.shape)}. Name modules with outputs of one shape, or add a layer to the "
                    "model that maps its features to that shape, and name that layer."
                )
            hints.append(F.mse_loss(student.float(), teacher.float()))
        return torch.stack(hints).sum()


def _record(into: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    if module.training and not torch.is_grad_enabled():
        return  # the student in a pass that nobody learns from
    if isinstance(output, Tensor):
        into[name] = output


def _check_name(model: nn.Module, name: str, whose: str) -> None:
    try:
        model.get_submodule(name)
    except AttributeError:
        names = [each for each, _ in model.named_modules() if each]
        raise WrongValue(
            f"features= of Distillation names {name!r}, and the {whose}, a {type(model).__name__}, has no such module. It has "
            f"{', '.join(names[:10])}{' …' if names[10:] else ''}."
        ) from None
