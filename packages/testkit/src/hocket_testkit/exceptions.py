"""Tests of exceptions in a run: none is swallowed, and none leaves anything behind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import hocket
from hocket.errors import Mistake
from hocket_testkit.compare import difference
from hocket_testkit.conformance import Conformance, Planned, contents, raiser
from hocket_testkit.footprint import changed, footprint
from hocket_testkit.handlers import silent_handlers


class _PlannedInStep(Planned, RuntimeError):
    """Raised by what a plug-in may wrap; also a RuntimeError, which some catch for the sake of a few."""


class Exceptions(Conformance):
    """Test that exceptions arrive as they are."""

    @pytest.mark.parametrize("place", ["forward", "layer", "loss", "loss function", "backward", "optimizer"])
    def test_does_not_swallow_exceptions(self, place: str) -> None:
        """An exception in the user's model, one of its layers, loss, backward or optimizer leaves ``fit`` as it is."""
        trainers: list[hocket.Trainer] = []
        raised: list[_PlannedInStep] = []

        def fail(*_: Any) -> None:
            if trainers and trainers[0].state.timestamp.batch and not raised:
                raised.append(_PlannedInStep(f"raised by a test in the {place}"))
                raise raised[0]

        def failing(function: Any) -> Any:
            def call(*given: Any) -> Any:
                fail()
                return function(*given)

            return call

        changes = {"loss": failing(self.loss())} if place == "loss function" and callable(self.loss()) else {}
        try:
            trainers.append(self.trainer(self.make(), model=self.seeded(self.model), **changes))
            task = trainers[0].state.task
            if place == "forward":
                task.register_forward_pre_hook(fail)
            elif place == "layer":
                for layer in task.modules():
                    if not any(layer.children()):
                        layer.register_forward_pre_hook(fail)
            elif place == "loss":
                vars(task)["loss"] = failing(task.loss)
            elif place == "backward":
                next(each for each in task.parameters() if each.requires_grad).register_hook(fail)
            elif place == "optimizer":
                trainers[0].state.optimizers[0].register_step_pre_hook(fail)
            trainers[0].fit()
            error: Exception | None = None
        except Exception as caught:
            if not raised and not (changes and isinstance(caught, Mistake)):  # it may be for one loss function only
                raise
            error = caught
        instead = "" if error is None else f", but {type(error).__name__} did"
        # A plug-in may say more of an error, if the user sees that too.
        assert not raised or raised[0] in _chain(error) or str(raised[0]) in str(error), (
            f"An exception in the user's {place} did not leave fit(){instead}: something caught it. Catch only errors that the "
            "plug-in handles, by their classes, and let all others propagate."
        )
        for trainer in trainers:
            trainer.close()

    def test_catches_only_what_it_handles(self) -> None:
        """No `except Exception` of its module drops the exception without a word."""
        lines = silent_handlers(self.declared())
        assert not lines, (
            f"{self._module()} swallows every exception in line {', '.join(map(str, lines))}. Catch the classes that are "
            "expected there, or raise again; at least warn with what failed."
        )

    @pytest.mark.parametrize("hook", ["before_forward", "before_loss", "after_train_batch", "batch_end", "eval_start"])
    def test_an_exception_leaves_nothing_behind(self, hook: str) -> None:
        """After any exception in a hook, it propagates unchanged, process and data are unchanged, and training can continue."""
        trainer = self.trainer(self.make(), callbacks=[raiser(hook, after=1 if hook == "eval_start" else 2)])
        data = trainer.state.train_data
        batches = copy.deepcopy(contents(data))
        before = footprint()
        with pytest.raises(Planned) as caught:
            trainer.fit()
        notes = [note for note in getattr(caught.value, "__notes__", ()) if note.startswith("Meanwhile")]
        assert not notes, f"When something else raised, the plug-in raised too: {notes}."
        different = changed(before, footprint())
        assert not different, (
            f"After an exception in {hook}, {', '.join(different)} is not as before. Undo it on `exception` or `close`."
        )
        found = difference(contents(data), batches, at="the training data")
        assert found is None, f"After an exception in {hook} the user's data has changed: {found}."
        trainer.close()
        trainer.close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The last fit raised")
            try:
                trainer.fit("1ba")
            except RuntimeError as refused:  # where an optimizer step was interrupted
                assert str(refused).startswith("The last fit raised")
        trainer.close()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Return an exception and the exceptions that its traceback shows before it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
