"""The Trainer: assembles a run from its parts and runs the training loop."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch import nn

from hocket.basics import launch_environment, seeding
from hocket.basics.control_c import Deferred, Interrupted, deferred
from hocket.basics.losses import Reduction
from hocket.basics.time import Interval, Time
from hocket.data.checks import check_batches
from hocket.errors import WrongState, WrongType, WrongValue
from hocket.help import attributes, optional_packages, warn
from hocket.help.arguments import understood
from hocket.loop import fit_duration
from hocket.loop.agreement import ranks_of
from hocket.loop.evaluate import EvalData, evaluate, evaluate_unseen, prepare_sets, sanity_check
from hocket.loop.nonfinite import NonFiniteGuard, Policy
from hocket.loop.settings import Settings
from hocket.plugins import switches
from hocket.plugins.bus import Bus
from hocket.run import assembly, same_on_ranks
from hocket.run.joined import Joined
from hocket.run.resolving import Parts, shows_only
from hocket.state import conversions
from hocket.state.metrics import MetricSet
from hocket.state.state import State
from hocket.state.task import Task
from hocket.state.task_log import connected

if TYPE_CHECKING:
    from hocket.basics.types import BatchTransformLike, MetricsLike, OptimizerLike, PartLike, PluginLike, ScheduleLike
    from hocket.checkpoints import Checkpoints, Report
    from hocket.plugins.plan import Plan
    from hocket.run.result import Result
    from hocket.state.substates import EvaluationSet
    from hocket_data.data_module import DataModule


def _is_duration(given: object) -> TypeGuard[str | Time]:
    return isinstance(given, Time) or (isinstance(given, str) and not given[:1].isalpha())


def _duration_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Make the first argument of `Trainer.fit` its duration, if it is one, beside ``train_data=``."""
    if len(args) > 1 and _is_duration(args[1]):
        if "duration" in kwargs:
            raise WrongType(
                f"Trainer.fit was given two durations, {args[1]!r} and «duration={kwargs['duration']!r}». Give one."
            )
        if "train_data" in kwargs:
            kwargs["duration"] = args[1]
            return args[0], kwargs.pop("train_data"), *args[2:]
    return args


class Trainer:
    """Train, evaluate and predict with the plug-ins that the arguments name, and no others.

    The constructor resolves all arguments, checks them against each other and sets up the run, so that errors appear before
    training. Two Trainers in one process are independent, one after the other or one within the other. While one computes, a
    Trainer in another thread is refused.

    Args:
        model: an `nn.Module` together with ``loss``, or a `hocket.Task`.
        train_data: any iterable of batches that can be iterated every epoch. Each batch goes to one rank, as in PyTorch:
            four ranks train on four batches at once. `hocket.data.Several` combines several loaders.
        loss: ``(outputs, targets)`` to a scalar tensor, a dict of named ones, or ``(mean, weight)``; see `hocket.Loss`. Also
            the name of a loss in `torch.nn.functional`, such as ``"cross_entropy"``, or a class such as ``nn.MSELoss``.
        loss_reduction: ``"sum"`` for a loss that is a sum over the batch; ``"batch"`` or ``"gathered"`` for one over its
            pairs, such as a contrastive loss, which must not be divided; see `hocket.Loss`. None for the declared reduction
            of the Task or the loss function, such as ``torch.nn.MSELoss(reduction="sum")``, else a mean, which is checked
            where it matters.
        inputs, targets: their location in a batch: a name, an index or a function of the batch. None for
            ``(inputs, targets)``; from a mapping the model receives all values by name, and the loss the mapping itself.
        outputs: the location in the model's output of what loss, metrics and predictions get, in the same form, such as
            ``"logits"``; None for all of it. Without ``loss``, it applies to metrics only.
        batch_transform: a function of the batch, on its device, that returns the batch to use in its place, or a list of them:
            for augmentation and normalization there. It comes first of all, once for the whole batch, in training, evaluation
            and prediction; ``{"train": f, "eval": g}`` gives each its own.
        global_batch: number of samples that all ranks together train on in one step (with ``accumulate``, in one of its
            batches). It replaces a DataLoader's ``batch_size``, and global batches are the same for any world size. If the
            batch size cannot be set (iterable data, custom batch samplers), the data has to yield batches of this size, which
            are divided.
        eval_data: one such iterable (labelled ``"eval"``), or several by label; `hocket.EvalSet` for sets with custom
            metrics or a custom interval.
        data: a `hocket.data.DataModule`, which makes the data of fit, evaluate and predict, instead of ``train_data`` and
            ``eval_data``.
        metrics: evaluation metrics by name: objects with ``update``, ``compute`` and ``reset``, or a function that makes them;
            or a list of such objects or functions. ``"accuracy"``, ``"mae"`` and ``"mse"`` are known by these names.
        train_metrics: metrics over the training batches of each epoch, in the same form.
        optimizer: a function of the parameters (called after surgery), an optimizer, a name such as ``"adamw(lr=1e-3)"``, or
            several; None to ask the task.
        schedule: a name such as ``"cosine(warmup=0.05dur)"``, a `hocket.schedules.Schedule`, a function of a
            `hocket.schedules.Clock` that returns a factor, ``"plateau(on='eval/loss')"``, or a function of the optimizer that
            returns a torch LRScheduler or another object with ``step()``, which is stepped every ``schedule_every`` optimizer
            steps or epochs, or a scheduler of timm.
        schedule_every: interval at which a torch LRScheduler is stepped, in optimizer steps or epochs: ``"1ba"``, ``"1ep"``; by
            default each step.
        duration: length of training, such as ``"10ep"``, ``"5000ba"``, ``"1e9tok"``, ``"90min"``; `fit` can override it. Of a
            list, such as ``["10ep", "2h"]``, the first to be over ends training, and schedules refer to the first entry.
        min_duration: the length before which requests to stop, such as by early stopping, have no effect.
        algorithms, callbacks, loggers: names, ``{"name": {...}}`` configurations or instances.
        strategy, precision, device, actions: one plug-in each, in the same form. ``"auto"`` chooses a strategy or device by
            the launch environment and hardware.
        devices: number of processes on this machine that train together, each on a separate device. The other processes run
            this script again, unless a launcher has started them. None for the launcher's processes, or this one alone.
        microbatch: samples per forward pass; ``"auto"`` finds the largest number that fits, before the first step. The
            gradient does not depend on it.
        accumulate: ``"4ba"`` makes four batches of the data one batch of training: one step, with the gradient of the mean
            over all their samples. They are computed on one after another. Everything in ``ba`` counts steps.
        eval_every: interval of evaluation; every fit also evaluates at its end. ``None`` to evaluate on request only.
        log_every: interval at which logged values are passed to the loggers.
        clip_gradients: the largest norm, or ``("norm" | "value" | "adaptive", threshold)``.
        nonfinite: handling of a non-finite loss or gradient: ``"raise"``, ``"skip"`` the batch, or ``"warn"``.
        seed: an int from 0 to 2**32 - 1 that makes the run reproducible, with private random number generators; None uses
            the global ones. A file's model is made with it; in Python, call ``torch.manual_seed`` before the model is made.
        deterministic: use only deterministic kernels during fit, evaluate and predict.
        compile: ``True``, a mode of `torch.compile` such as ``"reduce-overhead"``, or its keyword arguments.
        checkpoints: the folder of checkpoints, from which a run can resume, or `hocket.Checkpoints` with their interval.
        resume: the folder of a checkpoint to resume from, or ``"auto"`` for the newest valid one of ``checkpoints``, if any.
        run_name: the name of this run, and of its folder in ``folder``; None generates one. The folder belongs to this run
            only: a new run of the same name is refused, a resumed run continues its files.
        folder: the folder that holds the folders of runs.
        plugins: restricts the installed plug-ins: False for those of hocket's standard packages only, or a list of names.
        profile_plugins: measure the time of each plug-in on each hook.
        profile: batches to profile, such as ``"5ba after 10ba"``, or True. A summary in the folder of the run then says
            where their time goes and what to try. Also the arguments of the callback ``profiler``, or an instance.
        limit_train, limit_eval, limit_predict: maximum number of batches of an epoch or set; a float is the fraction of all.
        fast_dev_run: run this many batches of training and of each evaluation set as a test. It starts fresh and writes
            nothing: no checkpoint, no file, no row of a logger.
        overfit: train only on the first this many batches, the same in every epoch, as a test that writes nothing either.
        detect_anomaly: enable torch's (slow) anomaly detection, which names the forward operation behind a NaN gradient.
        summary: show layers, output shapes, parameters and FLOPs of the model once, before the first step; see
            `hocket.model_summary`.
        sanity_eval: evaluate this many batches of every evaluation set before training, and discard the results. Callbacks
            and loggers are not called.

    Raises:
        hocket.plugins.PluginError: a plug-in is missing or broken, or cannot be combined with another.
        TypeError, ValueError: an argument is invalid; the message says which one and what to write.

    Example:
        >>> import hocket, torch
        >>> inputs = torch.randn(64, 4)
        >>> dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="adamw(lr=0.1)", device="cpu",
        ...     train_data=torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True), duration="5ep",
        ... )
        >>> result = trainer.fit()
        >>> result.timestamp.batch
        20
    """

    @understood
    def __init__(
        self,
        model: nn.Module,
        train_data: Iterable[Any] | None = None,
        *,
        loss: Callable[[Any, Any], Any] | type[nn.Module] | str | None = None,
        loss_reduction: Reduction | None = None,
        inputs: PartLike | None = None,
        targets: PartLike | None = None,
        outputs: PartLike | None = None,
        batch_transform: BatchTransformLike | None = None,
        global_batch: int | None = None,
        eval_data: EvalData | None = None,
        data: DataModule | None = None,
        metrics: MetricsLike | None = None,
        train_metrics: MetricsLike | None = None,
        optimizer: OptimizerLike | None = None,
        schedule: ScheduleLike | None = None,
        schedule_every: str | Time | None = None,
        duration: str | Time | Sequence[str | Time] | None = None,
        min_duration: str | Time | None = None,
        algorithms: Sequence[PluginLike] = (),
        callbacks: Sequence[PluginLike] = (),
        loggers: Sequence[PluginLike] = (),
        strategy: PluginLike = "auto",
        precision: PluginLike = "fp32",
        device: PluginLike = "auto",
        devices: int | None = None,
        actions: PluginLike = "default",
        microbatch: int | Literal["auto"] | None = None,
        accumulate: str | Time | None = None,
        eval_every: str | Interval | None = "1ep",
        log_every: str | Interval = "10ba",
        clip_gradients: float | tuple[Literal["norm", "value", "adaptive"], float] | None = None,
        nonfinite: Policy = "raise",
        seed: int | None = None,
        deterministic: bool = False,
        compile: bool | str | Mapping[str, Any] = False,
        checkpoints: Checkpoints | str | Path | None = None,
        resume: str | Path | None = None,
        run_name: str | None = None,
        folder: str | Path = "runs",
        plugins: bool | Sequence[str] | None = None,
        profile_plugins: bool = False,
        profile: PluginLike | bool | None = None,
        limit_train: int | float | None = None,
        limit_eval: int | float | None = None,
        limit_predict: int | float | None = None,
        fast_dev_run: int | None = None,
        overfit: int | None = None,
        detect_anomaly: bool = False,
        sanity_eval: int = 0,
        summary: bool = False,
    ) -> None:
        from hocket.plugins import instance_owners  # here, so that importing this module stays cheap

        given = {**locals(), "checkpoints": conversions.checkpoints(checkpoints, folder)}
        #: The arguments, checked and converted.
        self.settings = settings = Settings(**{name: given[name] for name in Settings.arguments()})
        #: The words of the command line that resumes this run, if one has started it; shown after a fit.
        self.command: Sequence[str] | None = None
        #: Whether loggers have the hyperparameters.
        self._described = False
        with switches.use(settings.plugins):
            parts = assembly.parts_of(settings, model)
        bus = Bus(parts.attachments, profile=settings.profile_plugins)
        task = assembly.task_of_run(settings, model, bus)
        # The plan comes before the ranks are joined: what cannot work is refused before processes start.
        self._plan = assembly.plan_of(settings, parts, task, bus)
        self._join(parts, task, bus)
        self._assemble()
        instance_owners.claim(parts.attachments, self.state.run_name)

    def _join(self, parts: Parts, task: Task, bus: Bus) -> None:
        """Join the other ranks, and make the state and the loop of the run, which need rank and device."""
        from hocket.run.data import RunData  # here, so that importing this module stays cheap

        settings = self.settings
        self._joined = Joined(parts, bus, settings.devices, same_on_ranks.of_settings(settings, task))
        self._randomness = seeding.RandomStream(settings.seed, parts.strategy.data_rank)
        self.state = state = assembly.state_of(settings, parts, task, self._joined)
        self._guard = NonFiniteGuard(settings.nonfinite, parts.device.asynchronous)
        self._loop = assembly.loop_of(settings, state, self._guard)
        self._data = RunData(state, self._loop, settings)
        # After `Joined`, whose finalizer leaves the process group: finalizers run in reverse order.
        self._closing = weakref.finalize(self, _close, state)

    def _assemble(self) -> None:
        """Set up model, optimizers and data, and load the checkpoint to resume from."""
        from hocket.run import content  # here, so that importing this module stays cheap

        settings, state, bus = self.settings, self.state, self.state.bus
        with self._running(), switches.use(settings.plugins):
            initial, line = assembly.set_up(settings, state, self._joined)
            if line is not None:
                self._plan = dataclasses.replace(self._plan, run={**self._plan.run, "optimizer": line})
            self._loop.metrics = MetricSet("train", settings.train_metrics, state)
            held = content.Parts(self._loop, self._guard, self._randomness, settings.given, initial, self._data.module)
            state.content = content.content_of(state, held)
            if settings.train_data is not None:
                self._data.train_on(settings.train_data)  # after the content, which holds the position in the data
            self._data.evaluate_on(settings.eval_data)
            same_on_ranks.over_ranks(bus, state.strategy.world_size, same_on_ranks.of_assembled(state))
            bus.before_load(state)
            if settings.resume is not None:
                bus.resume(state, settings.resume)
            bus.after_load(state)
            if any(attachment.kind == "loggers" and not shows_only(attachment) for attachment in bus.attachments):
                ranks_of(state).agree(state.folder.check)  # after a resumed run has its identity

    # --- public methods

    def plan(self) -> Plan:
        """Return the plan of the run, made before surgery: call orders, configurations and planned replacements.

        Example:
            >>> import hocket, torch
            >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), algorithms=["ema"], device="cpu")
            >>> print(trainer.plan())
            model       Linear, 5 parameters
            ...
            algorithms  ema  (hocket-algorithms-general ...)
            events      in order
                        fit_start        ema
            ...
        """
        return self._plan

    @functools.partial(understood, rearranged=_duration_first)
    def fit(
        self,
        train_data: Iterable[Any] | str | Time | None = None,
        eval_data: EvalData | None = None,
        *,
        duration: str | Time | None = None,
    ) -> Result:
        """Train until the Trainer's duration is reached, or for ``duration`` more, which may also be the first argument.

        A fit continues where the last one ended, also within an epoch, unless it is given new ``train_data``. Ctrl-C stops
        after the batch in progress, and the next fit continues from there; a second Ctrl-C interrupts immediately.

        Raises:
            ValueError: training data or an optimizer is missing, or the training data yields no batches.
            FloatingPointError: the loss is non-finite, and ``nonfinite="raise"``.
            RuntimeError: an exception interrupted the last fit in an optimizer step, or the loading of a checkpoint.

        Example:
            >>> import hocket, torch
            >>> data = [(torch.randn(8, 4), torch.randn(8, 1))] * 10
            >>> trainer = hocket.Trainer(
            ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", train_data=data, device="cpu"
            ... )
            >>> trainer.fit("2ep").timestamp.epoch
            2
            >>> trainer.fit("5ba").timestamp.batch
            25
        """
        state = self.state
        if _is_duration(train_data):
            train_data, duration = None, train_data
        state.content.check_loaded()
        with self._only_thread():  # refuse before anything is set
            pass
        asked = {
            "fit(duration)": duration,
            "fit(train_data)": same_on_ranks.of_data(train_data),
            "fit(eval_data)": eval_data is not None,
        }
        same_on_ranks.over_ranks(state.bus, state.strategy.world_size, same_on_ranks.of_values(asked))
        if self.settings.fast:
            duration = "1ep"  # an epoch is limited to the given number of batches
        if train_data is not None:
            self._data.train_on(train_data)  # type: ignore[arg-type]  # any other text is refused there
        if eval_data is not None:
            self._data.evaluate_on(eval_data)
        self._data.make("train", "eval", running=self._running)
        self._loop.check()
        from hocket.help import failures
        from hocket.run import summary

        if not fit_duration.plan_fit(state, self._loop, self.settings.duration, self.settings.limits, duration):
            return self.result()
        try:
            checks = failures.arguments_checked(state, self.settings)
            with deferred(state.strategy.world_size == 1) as interruption, checks, self._running():
                state.bus.before_fit(state)
                summary.show_resumed(state, self.command)
                if not self._described:
                    self._described = True
                    state.bus.log_hyperparameters(state, self.settings.hyperparameters(state.bus.attachments))
                if not state.progress.ready:
                    sanity_check(state, state.eval_sets, self.settings.sanity_eval, interruption.check)
                with failures.first_loss_checked(state):
                    self._loop.run(interruption)
                state.bus.after_fit(state)
                state.bus.flush(state)
        except (KeyboardInterrupt, Interrupted) as error:
            summary.show(state, self.settings.checkpoints, self.command, interrupted=True)
            if isinstance(error, Deferred):  # without the frames of the loop, where nothing went wrong
                raise KeyboardInterrupt(*error.args) from None
            # Where it ended has been said. The command line says of an error without a message that it was interrupted.
            error.args = error.args or (f"Control-C ended a fit after batch {state.timestamp.batch}",)
            raise
        result = self.result()
        summary.show(state, self.settings.checkpoints, self.command, interrupted=False)
        return result

    def result(self) -> Result:
        """Return the result so far, as `fit` does, such as after Control-C. Every rank has to call it.

        Example:
            >>> import hocket, torch
            >>> trainer = hocket.Trainer(
            ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
            ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20,
            ... )
            >>> trainer.fit("1ep") == trainer.result()
            True
        """
        from hocket.run import summary

        return summary.result(self.state, self.settings.checkpoints)

    @understood
    def evaluate(
        self,
        data: EvalData | str | Path | None = None,
        *,
        metrics: MetricsLike | None = None,
        checkpoint: str | Path | None = None,
    ) -> dict[str, float]:
        """Evaluate ``data``, or the Trainer's ``eval_data``, and return losses and metrics as ``label/name``.

        Every sample counts once. With ``checkpoint`` it evaluates the weights of a checkpoint: ``"best"`` or ``"latest"`` of
        this run's, or the path of one; ``evaluate("best")`` is short for ``evaluate(checkpoint="best")``. Algorithms such as
        EMA have their state of that time. Afterwards the Trainer has its own weights again, bitwise. Callbacks and loggers are
        not called, and `result` does not change.

        Raises:
            ValueError: there is nothing to evaluate on, or there are no checkpoints.
            hocket.errors.CheckpointError: there is no such checkpoint, or it does not fit the model.

        Example:
            >>> import hocket, torch
            >>> data = [(torch.ones(8, 4), torch.zeros(8, 4))]
            >>> trainer = hocket.Trainer(model=torch.nn.Identity(), loss=torch.nn.MSELoss(), device="cpu")
            >>> trainer.evaluate({"test": data})
            {'test/loss': 1.0}
        """
        state, own = self.state, conversions.metrics(metrics)
        if isinstance(data, str | Path) and checkpoint is None:
            data, checkpoint = None, data
        if data is None:
            self._data.make("eval", running=self._running)
        sets: Mapping[str, EvaluationSet] = state.eval_sets
        if data is not None:
            sets = prepare_sets(state, data, own or self.settings.metrics, self.settings)
        if not sets:
            raise WrongValue(
                "There is nothing to evaluate on. «Pass data to evaluate(), or eval_data= to the Trainer¦Write `eval_data: "
                "module:function`», or return it from eval() of the data module."
            )
        asked = {
            "evaluate(data)": same_on_ranks.of_sets(sets),
            **same_on_ranks.of_values({"evaluate(checkpoint)": checkpoint}),
        }
        same_on_ranks.over_ranks(state.bus, state.strategy.world_size, asked)
        if checkpoint is not None:
            with self._weights_of(checkpoint), self._running():
                return evaluate_unseen(state, sets)
        with self._running():
            state.bus.eval_standalone_start(state)
            from hocket.help import failures

            with failures.first_loss_checked(state) if not state.timestamp.batch else nullcontext():
                values = evaluate(state, sets)
            state.bus.eval_standalone_end(state)
            state.bus.flush(state)
        return values

    @understood
    def predict(
        self, data: Iterable[Any] | None = None, *, checkpoint: str | Path | None = None, keep: bool = True
    ) -> list[Any]:
        """Return the model's outputs for every batch of ``data``, on the CPU. Each of n ranks predicts every n-th batch.

        Without ``data``, the Trainer's data module provides it. With ``checkpoint``, the model has the weights of a checkpoint,
        as in `evaluate`. Without ``keep``, return an empty list: plug-ins such as callbacks take the outputs of each batch.
        Raises ValueError without any data.

        Example:
            >>> import hocket, torch
            >>> trainer = hocket.Trainer(model=torch.nn.Flatten(), device="cpu")
            >>> outputs = trainer.predict([(torch.ones(8, 2, 2), torch.zeros(8)), (torch.ones(4, 2, 2), torch.zeros(4))])
            >>> torch.cat(outputs).shape
            torch.Size([12, 4])
        """
        argument = "predict(data)"
        if data is None and (module := self._data.module) is not None:
            data, argument = module.make("predict"), module.described("predict")
        if data is None:
            raise WrongValue(
                "There is nothing to predict on. Write trainer.predict(loader), or return batches from predict() of the data "
                "module."
            )
        check_batches(data, argument)
        from hocket.loop.predict import predict

        with nullcontext() if checkpoint is None else self._weights_of(checkpoint), self._running():
            return predict(self.state, data, self.settings.limit_predict, keep)

    def _weights_of(self, checkpoint: str | Path) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights of a checkpoint."""
        if self._loop.stage:
            raise WrongState("The weights of a checkpoint cannot be used during a fit. Use them before or after.")
        visit: AbstractContextManager[None] = optional_packages.module(
            "hocket_checkpoints.checkpoint_evaluation"
        ).weights_of(self.state, checkpoint, self.settings.checkpoints)
        return visit

    def model_state_dict(self, *, evaluated: bool | None = None) -> dict[str, Any]:
        """Return the full weights under the model's own names, on every rank, for any strategy.

        With ``evaluated``, return copies of the weights that evaluation and prediction use, such as the averages of EMA. None
        is False, with a warning if an algorithm evaluates other weights.

        Example:
            >>> import hocket, torch
            >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), device="cpu")
            >>> list(trainer.model_state_dict())
            ['weight', 'bias']
        """
        state = self.state
        if evaluated:
            with self._running():
                state.bus.predict_start(state)
                try:
                    return {
                        name: copy.deepcopy(value) for name, value in self.model_state_dict(evaluated=False).items()
                    }
                finally:
                    state.bus.predict_end(state)
        others = [plugin.name for plugin in state.bus.listeners("predict_start") if plugin.kind == "algorithms"]
        if others and evaluated is None:
            warn(
                f"These are the training weights, and evaluation uses those of the algorithm {others[0]!r}. Write "
                "trainer.model_state_dict(evaluated=True) for the latter, or «evaluated=False»."
            )
        from hocket.run.content import by_own_names  # here, so that importing this module stays cheap

        return by_own_names(state, state.bus.model_state(state.prepared))

    @understood
    def load_weights(
        self,
        weights: str | Path | Mapping[str, Any],
        *,
        strict: bool = True,
        ignore: Sequence[str] = (),
        remap: Mapping[str, str] | None = None,
    ) -> Report:
        """Load initial weights from a checkpoint or a file of another tool, for any strategy. Every rank has to call it.

        ``weights`` is a path that `hocket.checkpoints.read_weights` reads, or tensors by name. The other arguments, the
        result and the errors are as in `hocket.checkpoints.load_weights`, with the model's own names.

        Example:
            >>> import hocket, torch
            >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), device="cpu")
            >>> report = trainer.load_weights({"fc.weight": torch.ones(1, 4)}, strict=False, remap={"fc.": ""})
            >>> report.missing
            ('bias',)
        """
        load_into, given = (
            optional_packages.module("hocket_checkpoints.weights").load_into,
            conversions.weights(weights),
        )
        if self._loop.stage:
            raise WrongState("Weights cannot be loaded during a fit. Load them before fit starts.")
        report: Report = load_into(self.state, self.model_state_dict(evaluated=False), given, strict, ignore, remap)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return the state that makes a resumed run bitwise identical; see `hocket_checkpoints.content`.

        Every rank has to call it. Tensors are those of the run, as in ``torch.nn.Module.state_dict``, and change as it trains:
        copy them (``copy.deepcopy``) if the run goes on. To continue the fit, call it in a callback's ``batch_checkpoint`` or
        ``epoch_checkpoint``; to begin another fit, call it in ``fit_end`` or between fits.

        Example:
            >>> import hocket, torch
            >>> model = torch.nn.Linear(4, 1)
            >>> trainer = hocket.Trainer(model=model, optimizer="sgd(lr=0.1)", device="cpu")
            >>> saved = trainer.state_dict()
            >>> trainer.load_state_dict(saved)
        """
        self._data.make("train", "eval", running=self._running)
        return self.state.content.state_dict()

    @understood
    def load_state_dict(self, tree: Mapping[str, Any], strict: bool = True, ignore: Sequence[str] = ()) -> None:
        """Load a `state_dict` into a Trainer with the same arguments; see `hocket_checkpoints.content`.

        Every rank has to call it. Entries that globs in ``ignore`` match, such as ``"optimizers.*"`` or
        ``"model.network.head.*"``, are not loaded.
        """
        saved = conversions.tree(tree)
        if self._loop.stage:
            raise WrongState("State cannot be loaded during a fit. Load it before fit starts.")
        self.state.content.load_state_dict(saved, strict, ignore)

    def close(self) -> None:
        """Release the resources of all plug-ins. Called automatically after an exception and at exit.

        A closed Trainer can be used again: a fit continues where the last one ended, and plug-ins are closed again afterwards.
        """
        self._loop.close()
        for evaluated in self.state.eval_sets.values():
            evaluated.source.close()
        self._closing()  # a finalizer, which runs at most once

    def __repr__(self) -> str:
        from hocket.basics import display
        from hocket.run import summary

        return display.text(*summary.of_trainer(self.state, self._plan, self.settings.checkpoints))

    def _repr_html_(self) -> str:
        from hocket.basics import display
        from hocket.run import summary

        return display.html(*summary.of_trainer(self.state, self._plan, self.settings.checkpoints))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise WrongType(
            "A Trainer cannot be pickled or copied: it holds processes, files and data. Write torch.save(trainer."
            "model_state_dict(), 'model.pt') for the weights, and «checkpoints='runs/a'» in the Trainer to continue the run."
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(attributes.missing("Trainer", name, self), name=name, obj=self)

        def __setattr__(self, name: str, value: object) -> None:
            if name[0] != "_" and name not in ("settings", "command", "state"):
                raise AttributeError(attributes.unset("Trainer", name, inspect.signature(Trainer).parameters))
            super().__setattr__(name, value)

    # --- internals

    def _only_thread(self) -> AbstractContextManager[None]:
        return seeding.only_thread(f"The Trainer of {type(self.state.model).__name__} (run {self.state.run_name!r})")

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Activate the Trainer's RNG state and kernel settings inside the context; close the Trainer after an exception."""
        state = self.state
        if not self._closing.alive:  # the Trainer was closed before
            self._closing = weakref.finalize(self, _close, state)
        with ExitStack() as stack:
            stack.enter_context(self._only_thread())
            stack.enter_context(self._randomness)
            stack.enter_context(connected(state.task, state.aggregates))
            if self.settings.deterministic:
                from hocket.loop import determinism

                stack.enter_context(determinism.kernels())
            if self.settings.detect_anomaly:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            try:
                yield
            except BaseException as raised:
                state.exception = error = launch_environment.cause_of(raised)
                try:
                    state.bus.exception(state)
                    self.close()
                finally:
                    state.borrowed.give_all_back()
                    state.exception = None
                if error is not raised:
                    raise error from raised
                raise


def _close(state: State) -> None:
    state.bus.close(state)  # includes plug-ins attached later
