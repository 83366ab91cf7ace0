"""Gradients of `hocket.Task.train_batch` that wait for a step by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.basics.plain_data import encode
from hocket.state.component import Check, Component, Saved, Tree
from hocket.state.state import State
from hocket.state.step import parameters_of

if TYPE_CHECKING:
    from hocket.loop.task_steps import TaskSteps


class GradientsByHand(Component):
    """Gradients and losses of ``step.manual`` that no step has used yet. They are means over ranks, the same on all."""

    path = "by_hand"

    def __init__(self, state: State, steps: TaskSteps) -> None:
        self._state, self._steps = state, steps

    def state_dict(self, gather: bool) -> Tree:
        """Return copies, because the next batch adds to the gradients, with the names of their optimizers."""
        return [
            {
                "optimizers": list(names),
                "gradients": [None if each is None else each.clone() for each in waiting.gradients or ()],
                "losses": encode([[name, value] for name, value in waiting.losses.items()]),
            }
            for names, waiting in self._steps.waiting.items()
        ]

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Accept gradients of parameters of the same shapes."""
        state, fitting, problems = self._state, {}, []
        for each in checkpoint.decode(saved):
            names, gradients = tuple(each["optimizers"]), each["gradients"]
            there = dict(zip(state.optimizer_names, state.optimizers, strict=True))
            held = parameters_of(there[name] for name in names or there if name in there)
            shapes = [parameter.shape for parameter in held]
            if [
                known if each is None else each.shape for known, each in zip(shapes, gradients, strict=False)
            ] == shapes:
                fitting[names] = (gradients, dict(each["losses"]))
            else:
                problems.append(
                    f"The checkpoint has gradients of {', '.join(map(repr, names)) or 'all optimizers'} that no by_hand.step() "
                    "has used, and they do not fit the parameters here."
                )
        return Check(fitting, problems)

    def absent(self, checkpoint: Saved) -> Check:
        """Accept older checkpoints, which have none."""
        return Check()

    def load_state_dict(self, saved: Any) -> None:
        """Continue with them."""
        self._steps.restore(saved)
