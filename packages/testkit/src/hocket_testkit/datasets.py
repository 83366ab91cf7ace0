"""The suite for data sets that are given by name."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
import torch

from hocket.data.adapters import adapt
from hocket.data.batches import count
from hocket.errors import Unsupported
from hocket_testkit.compare import difference
from hocket_testkit.conformance import Conformance
from hocket_testkit.footprint import changed, footprint
from hocket_testkit.sources import _seed, _taken, _through_a_file

#: At most this many batches are read of each split.
_READ = 6


class DatasetConformance(Conformance):
    """The tests that every data set must pass. Define ``make``, with as few and small batches as there can be.

    Example:
        >>> import functools, hocket, hocket_vision
        >>> class TestDigits(hocket.testkit.DatasetConformance):
        ...     def make(self):
        ...         return functools.partial(hocket_vision.digits, batch_size=32)
    """

    kind = "datasets"
    #: What it is called with, for training and for evaluation.
    splits: ClassVar[tuple[str, str]] = ("train", "test")
    test_make_gives_a_new_plugin_each_time = None  # type: ignore[assignment]  # it is a function
    test_implements_known_hooks_only = None  # type: ignore[assignment]  # it has no hooks

    def make(self) -> Any:
        """Return the function, or a `functools.partial` of it, that is called with ``"train"`` or ``"test"``."""
        return super().make()

    def declared(self) -> Any:
        """Return the function, or class, that the entry point names."""
        made = self.make()
        return getattr(made, "func", made)

    def loader(self, split: str) -> Any:
        """Return a new loader of a split."""
        _seed(3)
        return self.make()(split)

    def test_has_both_splits(self) -> None:
        """Each split is an iterable of batches with samples, which a Trainer takes."""
        for split in self.splits:
            source = adapt(self.loader(split))
            batch = next(iter(source.begin(0)), None)
            source.close()
            assert batch is not None, f"The split {split!r} is empty."
            assert count(batch).samples > 0, f"The first batch of {split!r} has no samples."

    def test_refuses_other_splits(self) -> None:
        """A split that does not exist is an error that names it."""
        with pytest.raises(Exception) as refused:
            self.make()("no-such-split")
        assert "no-such-split" in str(refused.value), (
            f"The split 'no-such-split' is refused with {str(refused.value)!r}. Name it, and the splits that there are."
        )

    def test_evaluation_data_are_always_the_same(self) -> None:
        """The evaluation split has the same batches in the same order, each time that it is read."""
        once, again = (self._batches(self.splits[1], seed) for seed in (1, 2))
        found = difference(again, once, at="the evaluation data")
        assert found is None, f"Two readings of {self.splits[1]!r} differ: {found}. Do not shuffle or augment it."

    def test_the_same_seed_gives_the_same_order(self) -> None:
        """Two loaders of the training split have the same batches with the same random numbers."""
        once, again = (self._batches(self.splits[0], 1) for _ in range(2))
        found = difference(again, once, at="the training data")
        assert found is None, (
            f"Two readings of {self.splits[0]!r} with the same random numbers differ: {found}. Draw from a generator with a "
            "seed, or from torch's."
        )

    def test_splits_share_no_sample(self) -> None:
        """No first input of an evaluation batch is in a training batch."""
        train, test = ({_key(batch) for batch in self._rows(split)} for split in self.splits)
        common = train & test
        assert not common, f"{len(common)} samples of {self.splits[1]!r} are in {self.splits[0]!r}, too."

    def test_continues_in_the_middle_of_an_epoch(self) -> None:
        """The rest of an epoch is the same when a run is resumed in the middle of it."""
        source = adapt(self.loader(self.splits[0]))
        _seed(4)
        batches = source.begin(0)
        next(batches)
        taken = _taken(source, 0, 1)
        expected = next(batches, None)
        source.close()
        if expected is None:
            pytest.skip("its epoch has a single batch")
        resumed = adapt(self.loader(self.splits[0]))
        _seed(99)
        rest = resumed.begin(0, _through_a_file(taken.position))
        from hocket.basics import seeding

        seeding.restore(seeding.from_tree(taken.random))
        got = next(rest, None)
        resumed.close()
        found = difference(got, expected, at="the second batch")
        assert found is None, (
            f"A resumed epoch continues with other samples: {found}. Return a DataLoader over a map-style data set, or an "
            "object with state_dict and load_state_dict."
        )

    def test_leaves_nothing_behind(self) -> None:
        """Reading a split changes nothing in the process, global random numbers included."""
        self._batches(self.splits[0], 1)  # what is imported once
        _seed(5)
        before = footprint()
        loader = self.make()(self.splits[0])
        different = changed(before, footprint())
        assert not different, (
            f"Making the loader changed {', '.join(different)}. Draw from torch.Generator().manual_seed(seed), not from the "
            "global generators."
        )
        assert inspect.isgenerator(loader) is False, "A generator can be read once only. Return a DataLoader or a list."

    def _batches(self, split: str, seed: int) -> list[Any]:
        loader = self.loader(split)
        _seed(seed)
        source = adapt(loader)
        batches = [batch for batch, _ in zip(source.begin(0), range(_READ), strict=False)]
        source.close()
        if not batches:
            raise Unsupported(f"The split {split!r} is empty.")
        return batches

    def _rows(self, split: str) -> list[Any]:
        return [
            row
            for batch in self._batches(split, 1)
            for tensor in [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)][
                :1
            ]
            if tensor.ndim > 1
            for row in tensor
        ]


def _key(row: torch.Tensor) -> bytes:
    return row.contiguous().numpy().tobytes()
