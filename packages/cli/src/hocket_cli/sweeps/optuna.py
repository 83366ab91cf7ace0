"""Optuna's samplers and pruning (Akiba et al. 2019, arXiv 1907.10902), by a journal that the processes of a sweep share."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hocket.help import installing
from hocket.plugins import PluginError
from hocket_cli.document import flow
from hocket_cli.sweeps.space import Choices, Space

#: The samplers, and the pruners, by their names here.
SAMPLERS = {"tpe": "TPESampler", "gp": "GPSampler", "cmaes": "CmaEsSampler", "qmc": "QMCSampler"}
PRUNERS = {"median": "MedianPruner", "hyperband": "HyperbandPruner", "halving": "SuccessiveHalvingPruner"}
_STUDY = "sweep"
#: What a sampler imports beside Optuna, which does not install it.
_NEEDS = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",), "qmc": ("scipy",)}


def check_installed(sampler: str) -> None:
    """Raise PluginError if Optuna, or a package that the sampler needs beside it, is not installed."""
    if find_spec("optuna") is None:
        raise PluginError(
            "This sampler and pruning are Optuna's, which is not installed. Type: "
            f"{installing.command('optuna')}. Without it, there are --sampler grid and random."
        )
    if missing := [name for name in _NEEDS.get(sampler, ()) if find_spec(name) is None]:
        raise PluginError(
            f"--sampler {sampler} needs {' and '.join(missing)}, which is not installed. Type: pip install "
            f"{' '.join(missing)}. --sampler tpe needs nothing but Optuna."
        )


class Study:
    """A study in a file.

    Args:
        journal: the file, which is created if it is missing.
        mode: ``"min"`` or ``"max"``.
        prune: the name of a pruner, or None.
    """

    def __init__(self, journal: Path, mode: str, prune: str | None) -> None:
        import optuna

        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        from optuna.storages.journal import JournalFileBackend

        pruner = getattr(optuna.pruners, PRUNERS[prune])() if prune else optuna.pruners.NopPruner()
        self._storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        self._study = optuna.create_study(
            storage=self._storage, study_name=_STUDY, direction="minimize" if mode == "min" else "maximize", pruner=pruner,
            load_if_exists=True,
        )  # fmt: skip

    def ask(
        self, space: Space, sampler: str, seed: int, values: Mapping[str, Any] | None
    ) -> tuple[int, dict[str, Any]]:
        """Return the number of a new trial and its values: those given, or those that the sampler suggests."""
        distributions = {key: self._distribution(each) for key, each in space.items()}
        if values is not None:
            texts = {key: flow(value) if isinstance(space[key], Choices) else value for key, value in values.items()}
            self._study.enqueue_trial(texts)
        else:
            number = len(self._study.get_trials(deepcopy=False))
            with warnings.catch_warnings():  # some are experimental
                warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
                # A continued sweep asks as if it had never stopped.
                self._study.sampler = getattr(self._optuna.samplers, SAMPLERS[sampler])(seed=seed + number)
        trial = self._study.ask(distributions)
        return trial.number, {key: self._value(space[key], value) for key, value in trial.params.items()}

    def tell(self, number: int, value: float | None, pruned: bool) -> None:
        """Record the end of a trial; no value means that it failed."""
        states = self._optuna.trial.TrialState
        if value is None or value != value:
            self._study.tell(number, state=states.PRUNED if pruned else states.FAIL, skip_if_finished=True)
        else:
            self._study.tell(
                number, None if pruned else value, states.PRUNED if pruned else None, skip_if_finished=True
            )

    def report(self, number: int, value: float, step: int) -> bool:
        """Report an intermediate value, and return whether the trial should be pruned."""
        study = self._storage.get_study_id_from_name(_STUDY)
        trial = self._optuna.trial.Trial(
            self._study, self._storage.get_trial_id_from_study_id_trial_number(study, number)
        )
        trial.report(value, step)
        return bool(trial.should_prune())

    def _distribution(self, each: Any) -> Any:
        distributions = self._optuna.distributions
        if isinstance(each, Choices):
            return distributions.CategoricalDistribution([flow(value) for value in each.values])
        if each.form == "int":
            return distributions.IntDistribution(int(each.low), int(each.high))
        return distributions.FloatDistribution(each.low, each.high, log=each.form == "loguniform")

    @staticmethod
    def _value(each: Any, value: Any) -> Any:
        return next(one for one in each.values if flow(one) == value) if isinstance(each, Choices) else value
