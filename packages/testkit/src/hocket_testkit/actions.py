"""The suite for actions: implementations of all steps of the loop."""

from __future__ import annotations

from typing import Any

from hocket.hookspecs import Actions
from hocket_testkit.runs import RunConformance


class ActionsConformance(RunConformance):
    """The tests that a plug-in of all actions must pass. Define ``make``.

    Example:
        >>> import hocket
        >>> from hocket.loop.actions import DefaultActions
        >>> class TestDefaultActions(hocket.testkit.ActionsConformance):
        ...     def make(self):
        ...         return DefaultActions()
    """

    kind = "actions"

    def make(self) -> Any:
        """Return a new object with all actions."""
        return super().make()

    def test_has_every_action(self) -> None:
        """Each action of the contract is a method: there is no other default below it."""
        made = self.make()
        missing = [
            name for name in vars(Actions) if not name.startswith("_") and not callable(getattr(made, name, None))
        ]
        assert not missing, (
            f"{type(made).__name__} has no {', '.join(missing)}. Inherit from hocket.loop.actions.DefaultActions, and override "
            "what differs."
        )

    def test_every_action_answers(self) -> None:
        """No action of a run returns None, which means that it did nothing."""
        made = self.make()
        silent: set[str] = set()

        def answering(name: str, function: Any) -> Any:
            def call(*args: Any) -> Any:
                result = function(*args)
                if result is None:
                    silent.add(name)
                return result

            return call

        trainer = self.trainer(made)
        bus = trainer.state.bus
        names = (
            "gradients",
            "split_batch",
            "move_batch",
            "loss",
            "backward",
            "optimizer_step",
            "zero_grad",
            "schedule_step",
        )
        bus.replace({name: answering(name, getattr(bus, name)) for name in names})
        trainer.fit("1ep")
        assert not silent, f"{', '.join(sorted(silent))} returned None. Return True, or what the action computes."
