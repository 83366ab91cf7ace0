"""Tests of what is seen from outside in one run, for all kinds of plug-ins that take part in a run."""

from __future__ import annotations

from hocket_testkit.observing import Observation

#: By suite: what was seen of its plug-in.
_OBSERVED: dict[type, Observation] = {}


class Observed:
    """Tests of what is seen from outside in one run, which they share."""

    def observation(self) -> Observation:
        """Return what is seen of a plug-in from outside in one run, which several tests share."""
        if type(self) not in _OBSERVED:
            _OBSERVED[type(self)] = self._observe()
        return _OBSERVED[type(self)]

    def _observe(self) -> Observation:
        raise NotImplementedError

    def _no_fault(self, name: str) -> None:
        fault = self.observation().faults.get(name)
        assert fault is None, fault

    def test_keeps_no_tensors(self) -> None:
        """After a run was closed, the plug-in keeps no tensors alive but those of its state."""
        self._no_fault("tensors")

    def test_closes_files_threads_and_processes(self) -> None:
        """After a run was closed, files, threads and processes of the plug-in are closed, too."""
        self._no_fault("resources")

    def test_removes_its_hooks(self) -> None:
        """After a run was closed, the user's model has the hooks that it had before."""
        self._no_fault("hooks")

    def test_does_not_grow(self) -> None:
        """Memory, hooks, threads and files do not grow with every batch."""
        self._no_fault("growth")

    def test_leaves_global_generators_alone(self) -> None:
        """The global random numbers of a run depend on its seed, and are not the same again and again."""
        self._no_fault("numbers")

    def test_keeps_no_state_in_the_class(self) -> None:
        """A run changes no attribute of the class or its module, which other runs share."""
        self._no_fault("class")

    def test_counts_what_the_data_hold(self) -> None:
        """The run counts the epochs, batches and samples of the data, and the tokens that the model gets."""
        self._no_fault("counts")

    def test_leaves_the_process_as_it_was(self) -> None:
        """After a run was closed, the environment, functions of torch and hocket and all that is shared are as before."""
        self._no_fault("process")

    def test_writes_into_the_run_folder_only(self) -> None:
        """A run leaves nothing in the working directory, where that was empty, as in ``hocket plugins check``."""
        self._no_fault("files")

    def test_does_not_print_in_every_batch(self) -> None:
        """What it has to say is logged."""
        self._no_fault("print")

    def test_does_not_sleep_in_every_batch(self) -> None:
        """No call of ``time.sleep`` in its code makes each batch wait; other ways to wait are not seen."""
        self._no_fault("sleep")
