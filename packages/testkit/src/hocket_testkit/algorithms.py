"""The suite for algorithms."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import ClassVar

import hocket
from hocket.hookspecs import Event
from hocket.plugins import registry
from hocket.surgery import NoEffectWarning
from hocket_testkit.cards import names_a_source, own_links, stale
from hocket_testkit.compare import difference
from hocket_testkit.conformance import parameters_of, weights
from hocket_testkit.runs import RunConformance


class AlgorithmConformance(RunConformance):
    """The tests that every algorithm must pass. Define ``make``; also ``model``, ``data``, ``loss`` and ``arguments`` if the
    method is not for a tiny convolutional network on generated images.

    Example:
        >>> import hocket, hocket_general
        >>> class TestEMA(hocket.testkit.AlgorithmConformance):  # pytest runs the inherited tests
        ...     def make(self):
        ...         return hocket_general.EMA(half_life="10ba")
    """

    kind = "algorithms"
    #: Path of the method card, relative to the test file, if it is neither ``docs/algorithms/<name>.md`` nor the README.md.
    card: ClassVar[str | None] = None

    def make(self) -> hocket.Algorithm:
        """Return a new algorithm."""
        algorithm: hocket.Algorithm = super().make()
        return algorithm

    # --- declarations

    def test_declares_itself_properly(self) -> None:
        """Events, phase and needs have the right types; names of other algorithms are collections, not a string."""
        algorithm = self.make()
        who = type(algorithm).__name__
        assert isinstance(algorithm, hocket.Algorithm), f"{who} is not a hocket.Algorithm. Inherit from it."
        for event in algorithm.events:
            assert isinstance(event, Event), f"{who}.events holds {event!r}. Use members of hocket.Event."
        assert isinstance(algorithm.phase, hocket.Phase), f"{who}.phase is {algorithm.phase!r}, not a hocket.Phase."
        assert isinstance(algorithm.needs, hocket.Need), f"{who}.needs is {algorithm.needs!r}, not a hocket.Need."
        for attribute in ("before", "after", "conflicts"):
            names = getattr(algorithm, attribute)
            well = not isinstance(names, str) and all(isinstance(name, str) for name in names)
            assert well, f"{who}.{attribute} is {names!r}. Write a tuple of names: {attribute} = ('{names}',)."

    def test_names_its_source(self) -> None:
        """The docstring of the class or of its module names the source of the method."""
        cls = type(self.make())
        docs = f"{cls.__doc__ or ''}\n{inspect.getmodule(cls).__doc__ or ''}"
        assert names_a_source(docs, self._own_links()), (
            f"Neither the docstring of {cls.__name__} nor that of its module says where the method comes from. Name the paper "
            "and the equation, such as `(Neelakantan et al. 2015, eq. 1)`, or write `Source: …`; a link to the plug-in's own "
            "pages does not count."
        )

    def test_has_a_card(self) -> None:
        """A page for users: what it does, its source and every hyperparameter."""
        cls, (card, text) = type(self.make()), self._card()
        assert text, (
            f"{cls.__name__} has no method card. Write docs/algorithms/{self.plugin_name()}.md or a README.md next to "
            "pyproject.toml, with its source and hyperparameters; or say where it is: card = '../docs/card.md'."
        )
        assert names_a_source(text, self._own_links()), (
            f"{card} does not say where the method comes from. Name the paper, with a link, there or in a method card "
            f"docs/algorithms/{self.plugin_name()}.md."
        )
        missing = [name for name in parameters_of(cls) if not re.search(rf"\b{re.escape(name)}\b", text)]
        assert not missing, f"{card} does not mention {', '.join(missing)}. List every hyperparameter with its default."
        old = stale(text, self.plugin_name() or cls.__name__, cls, several=False)
        assert not old, f"{card} is out of date: {'; '.join(old)}. Write what the class takes now."

    def _own_links(self) -> list[str]:
        entry = registry.entry_of(self.kind, type(self.make()))
        return own_links(entry.dist if entry is not None else "hocket")

    def _card(self) -> tuple[str, str]:
        """Return where the method card is, and its text; both are empty if there is none."""
        here = Path(inspect.getfile(type(self))).resolve().parent
        folders = [here, *here.parents]
        cards = [folder / "docs" / "algorithms" / f"{self.plugin_name()}.md" for folder in folders]
        readmes = [folder / "README.md" for folder in folders if (folder / "pyproject.toml").is_file()]
        candidates = [*cards, *readmes[:1]] if self.card is None else [here / self.card]
        path = next((path for path in candidates if path.is_file()), None)
        return ("", "") if path is None else (str(path), path.read_text(encoding="utf-8"))

    # --- behaviour

    def test_has_an_effect(self) -> None:
        """The weights, or the evaluation metrics, differ from those of a run without it."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NoEffectWarning)
            with_it, without = self.trainer(self.make()), self.trainer()
            metrics = with_it.fit().metrics, without.fit().metrics
        differs = difference(weights(with_it), weights(without)) or difference(*metrics)
        if differs is None and (of_model := [each for each in said if issubclass(each.category, NoEffectWarning)]):
            self.finds_nothing(str(of_model[0].message))
        assert differs is not None, (
            "Training with the algorithm is bitwise identical to training without it. Choose settings in make(), or a "
            "model, for which it acts; declare an algorithm that must not change the numbers in `exempt`."
        )

    def finds_nothing(self, message: str) -> None:
        """Called with the warning of an algorithm that finds nothing to change in `model`. In a suite of its own that fails."""

    def test_records_and_previews_surgery(self) -> None:
        """Replaced modules are in ``state.replacements``, and in the plan of the run."""
        self._no_fault("surgery")
