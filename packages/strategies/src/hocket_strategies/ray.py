"""Ray Train: its workers as ranks, started, scaled and restarted by Ray."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hocket import Device, State
from hocket.errors import WrongState, WrongType
from hocket.help import installing
from hocket.plugins import PluginError
from hocket_strategies.ddp import DDP


class Ray(DDP):
    """Train data-parallel on the workers of Ray Train, and report metrics to it.

    Moritz et al. 2018, "Ray", arXiv 1712.05889. `launch` starts the workers. In them this is ``ddp``, with the same
    arguments. It reports to Ray after each evaluation, or at the end of a fit without one: the metrics, and as Ray's
    checkpoint a folder with ``model.pt``, the ``state_dict`` of the evaluated model. Needs the extra ``ray``.

    Example:
        >>> import hocket, hocket_strategies, torch
        >>> from hocket_strategies.ray import launch
        >>> def train():
        ...     trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), strategy=hocket_strategies.Ray())
        >>> result = launch(train, scaling={"num_workers": 2})  # doctest: +SKIP
    """

    _reported = False

    def setup_environment(self, device: Device) -> torch.device:
        """Join the workers. Raises RuntimeError in a process that Ray Train did not start, PluginError without Ray."""
        _import()
        try:
            from ray.train import get_context

            workers = get_context().get_world_size()
        except Exception as error:  # its class differs between versions
            raise WrongState(
                "«strategy='ray'» found no Ray Train worker in this process. Start the function or script that makes the "
                "Trainer with hocket_strategies.ray.launch(function, scaling={'num_workers': 2}), or use «strategy='ddp'» with "
                "torchrun."
            ) from error
        on = super().setup_environment(device)
        assert workers == self.world_size
        return on

    def eval_after_all(self, state: State) -> None:
        """Report while the model still holds the evaluated weights, such as averages."""
        self._report(state)

    def fit_end(self, state: State) -> None:
        """Report the current metrics if nothing was evaluated."""
        if not self._reported:
            self._report(state)

    def _report(self, state: State) -> None:
        """Report from every worker; Ray keeps the metrics of rank 0, and only together with a checkpoint."""
        from ray.train import Checkpoint, report

        loss = {} if state.loss is None else {"train/loss": state.loss.item()}
        metrics = {**loss, **state.metrics, "epoch": state.timestamp.epoch, "batch": state.timestamp.batch}
        with tempfile.TemporaryDirectory() as folder:  # Ray copies it to its storage
            if self.rank == 0:
                torch.save(state.model.state_dict(), Path(folder) / "model.pt")
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if self.rank == 0 else None)
        self._reported = True


def launch(
    training: Callable[..., Any] | str | Path,
    *,
    arguments: Mapping[str, Any] | Sequence[str] | None = None,
    scaling: Mapping[str, Any] | Any = None,
    failure: Mapping[str, Any] | Any = None,
    run: Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> Any:
    """Run a function or a script on each worker of a Ray Train `TorchTrainer`, and return Ray's ``Result``.

    The result has the last reported metrics and checkpoint, and the function's return value on rank 0.

    A worker group that fails is restarted, as often as ``failure`` allows, and calls the function from the beginning. The
    function decides what to resume from; `ray.train.get_checkpoint` returns the last checkpoint. If Ray is not initialised,
    it initialises itself on this machine.

    Args:
        training: a function that makes a Trainer with ``strategy="ray"`` (or ``"auto"``) and fits it, or the path of such a
            script, which must exist on each worker.
        arguments: keyword arguments of the function; for a script a list of strings, its command line.
        scaling: `ray.train.ScalingConfig` or its arguments, such as ``{"num_workers": 4, "use_gpu": True}``; one worker by
            default.
        failure: `ray.train.FailureConfig` or its arguments, such as ``{"max_failures": 3}``.
        run: further arguments of `ray.train.RunConfig`: name, storage_path.
        backend: of torch's process group; None for nccl with GPUs and gloo without.

    Raises:
        PluginError: Ray is not installed. TypeError: a configuration has no such argument, or ``arguments`` do not fit.
    """
    _import()
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        _work(training, arguments),
        torch_config=TorchConfig(backend=backend) if backend else None,
        scaling_config=_configured(train.ScalingConfig, scaling),
        run_config=train.RunConfig(failure_config=_configured(train.FailureConfig, failure), **(run or {})),
    )
    return trainer.fit()


def _work(
    training: Callable[..., Any] | str | Path, arguments: Mapping[str, Any] | Sequence[str] | None
) -> Callable[[], Any]:
    """Return the function that each worker calls."""
    if callable(training):
        if arguments is not None and not isinstance(arguments, Mapping):
            raise WrongType(
                f"«arguments={arguments!r}» should be keyword arguments of the function, such as {{'epochs': 3}}."
            )
        function: Callable[..., Any] = training
        keywords = dict(arguments or {})

        def call() -> Any:
            return function(**keywords)

        return call
    if isinstance(arguments, Mapping | str):
        raise WrongType(f"«arguments={arguments!r}» should be a script's command line, such as ['--epochs', '3'].")
    return partial(_run_script, str(Path(training).resolve()), list(arguments or ()))


def _run_script(path: str, arguments: list[str]) -> None:
    """Run ``python path arguments`` in this process."""
    before = sys.argv
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before


def _configured(kind: Any, given: Any) -> Any:
    if given is None or isinstance(given, Mapping):
        return kind(**(given or {}))
    return given


def _import() -> Any:
    try:
        import ray.train
        import ray.train.torch
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise PluginError(
            "«strategy='ray'» needs the package ray with Ray Train, which is not installed. Type: "
            f"{installing.command('ray', 'hocket-strategies')}. Without it, torchrun and «strategy='ddp'» train on "
            "several processes."
        ) from None
    return ray
