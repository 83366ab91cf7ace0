"""The suite for algorithms."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import ClassVar

import hocket
from hocket.hookspecs import Event
from hocket.testkit.compare import difference
from hocket.testkit.conformance import parameters_of, weights
from hocket.testkit.runs import RunConformance

_SOURCE = re.compile(r"arxiv|doi\b|https?://|\b(19|20)\d\d\b|sources?:", re.IGNORECASE)


class AlgorithmConformance(RunConformance):
    """What an algorithm has to pass. Define ``make``; ``model``, ``data``, ``loss`` and ``arguments`` where the tiny
    convolutional network on generated images is not what the method is for.

    Example:
        >>> import hocket, hocket_general
        >>> class TestEMA(hocket.testkit.AlgorithmConformance):  # pytest runs the inherited tests
        ...     def make(self):
        ...         return hocket_general.EMA(half_life="10ba")
    """

    kind = "algorithms"
    #: The method card, relative to the test file, where it is neither ``docs/algorithms/<name>.md`` nor the README.md.
    card: ClassVar[str | None] = None

    def make(self) -> hocket.Algorithm:
        """A new algorithm."""
        algorithm: hocket.Algorithm = super().make()
        return algorithm

    # --- what it says about itself

    def test_declares_itself_properly(self) -> None:
        """Events, phase and needs have their types; names of other algorithms are collections and not one string."""
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
        """Where the method comes from stands in the docstring of the class or of its module."""
        cls = type(self.make())
        docs = f"{cls.__doc__ or ''}\n{inspect.getmodule(cls).__doc__ or ''}"
        assert _SOURCE.search(docs), (
            f"Neither the docstring of {cls.__name__} nor that of its module says where the method comes from. Name the paper "
            "and the equation, such as `(Neelakantan et al. 2015, eq. 1)`, or write `Source: …`."
        )

    def test_has_a_card(self) -> None:
        """A page for users: what it does, its source and every hyperparameter."""
        cls, card = type(self.make()), self._card()
        assert card is not None, (
            f"{cls.__name__} has no method card. Write docs/algorithms/{self.plugin_name()}.md or a README.md next to "
            "pyproject.toml, with its source and hyperparameters; or say where it is: card = '../docs/card.md'."
        )
        text = card.read_text(encoding="utf-8")
        assert _SOURCE.search(text), (
            f"{card} does not say where the method comes from. Name the paper, with a link, there or in a method card "
            f"docs/algorithms/{self.plugin_name()}.md."
        )
        missing = [name for name in parameters_of(cls) if not re.search(rf"\b{re.escape(name)}\b", text)]
        assert not missing, f"{card} does not mention {', '.join(missing)}. List every hyperparameter with its default."

    def _card(self) -> Path | None:
        here = Path(inspect.getfile(type(self))).resolve().parent
        if self.card is not None:
            return here / self.card
        folders = [here, *here.parents]
        cards = [folder / "docs" / "algorithms" / f"{self.plugin_name()}.md" for folder in folders]
        readmes = [folder / "README.md" for folder in folders if (folder / "pyproject.toml").is_file()]
        return next((path for path in [*cards, *readmes[:1]] if path.is_file()), None)

    # --- what it does

    def test_has_an_effect(self) -> None:
        """The weights, or what evaluation finds, are not those of a run without it."""
        with_it, without = self.trainer(self.make()), self.trainer()
        metrics = with_it.fit().metrics, without.fit().metrics
        differs = difference(weights(with_it), weights(without)) or difference(*metrics)
        assert differs is not None, (
            "Training with the algorithm gave bit for bit what training without it gives. Choose settings in make(), or a "
            "model, for which it acts; an algorithm that must not change the numbers says so in `exempt`."
        )

    def test_works_with_microbatches(self) -> None:
        """A batch in pieces trains as the batch in one piece does, to rounding."""
        whole, cut = self.trainer(self.make()), self.trainer(self.make(), microbatch=3)
        whole.fit()
        cut.fit()
        found = difference(weights(cut), weights(whole), self.tolerance("test_works_with_microbatches", 1e-4))
        assert found is None, (
            f"With microbatch=3 the weights differ: {found}. Act on the whole batch (Event.AFTER_DATALOADER, "
            "Event.AFTER_TRAIN_BATCH) or on every sample alike. If it is meant to differ, say why in `exempt`; if it is "
            "rounding, allow for it in `tolerances`."
        )
