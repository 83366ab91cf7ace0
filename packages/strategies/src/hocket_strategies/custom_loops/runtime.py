"""The layer below the Trainer: processes, device, precision and strategy, for custom training loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hocket.basics import seeding
from hocket.data.adapters import prepared
from hocket.data.checks import check_batches
from hocket.devices import model_placement
from hocket.errors import WrongState, WrongType, WrongValue
from hocket.help import attributes
from hocket.help.arguments import explained, understood, unknown
from hocket.hookspecs.strategies import replicas
from hocket.loop.nonfinite import Policy
from hocket.optim.clipping import clip_gradients
from hocket.optim.closures import closure_for
from hocket.optim.optimizers import check_parameters
from hocket.plugins import switches
from hocket.plugins.bus import Bus
from hocket.run.resolving import resolve
from hocket.state import conversions
from hocket_strategies.custom_loops import checks, saving
from hocket_strategies.custom_loops.accumulation import Gradients
from hocket_strategies.custom_loops.collectives import Collectives
from hocket_strategies.custom_loops.first_step import FirstStep
from hocket_strategies.custom_loops.optimizers import SET_UP_ALL, PreparedOptimizers
from hocket_strategies.custom_loops.prepared import Owner, PreparedData, PreparedModel, inner

if TYPE_CHECKING:
    from hocket.basics.types import PluginLike
    from hocket_strategies.custom_loops.loop_steps import LoopSteps


class Runtime(Collectives):
    """Join the other processes and prepare models, optimizers and data for a custom training loop.

    Gradients accumulate between steps and those of several losses add up, as in PyTorch. ``backward`` takes the mean of each
    loss over ranks, weighted by the samples of their batches. `accumulate` takes the mean over microbatches, however unevenly
    samples are distributed. With one process and no microbatches, the result is bitwise identical to a plain PyTorch loop.

    Args:
        strategy, precision, device, devices: as in `hocket.Trainer`.
        seed: seed of the global random number generators, plus the rank; None leaves them unchanged.
        plugins: restricts the installed plug-ins: False for those of hocket's standard packages only, or a list of names.

    Raises:
        hocket.plugins.PluginError: a plug-in is missing or broken.
        TypeError, ValueError: an argument is invalid; the message says which one and what to write. Or the strategy or
            precision acts on events of the Trainer's loop, which a custom loop does not have.

    Example:
        >>> import hocket, torch
        >>> runtime = hocket.Runtime(device="cpu", seed=1)
        >>> net = torch.nn.Linear(4, 1)
        >>> model, optimizer = runtime.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        >>> for inputs, targets in runtime.setup_data([(torch.randn(8, 4), torch.randn(8, 1))] * 10):
        ...     runtime.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        ...     stepped = runtime.step(optimizer)
    """

    @understood
    def __init__(
        self,
        *,
        strategy: PluginLike = "auto",
        precision: PluginLike = "fp32",
        device: PluginLike = "auto",
        devices: int | None = None,
        seed: int | None = None,
        plugins: bool | list[str] | None = None,
    ) -> None:
        seed = seeding.check_seed(seed)
        with switches.use(plugins):
            parts = resolve(
                strategy=strategy,
                precision=conversions.precision(precision),
                device=conversions.device(device),
                devices=devices,
            )
        checks.check_own_loop(parts)
        super().__init__(parts, Bus(parts.attachments), devices, {})
        if seed is not None:
            seeding.seed_everything(seed + self.strategy.data_rank)

        self._gradients = Gradients()
        self._first_step = FirstStep(self.precision, self._gradients)
        self._steppers: list[LoopSteps] = []
        self._optimizers = PreparedOptimizers(self._gradients, self._first_step)

    # --- set-up

    @understood
    def setup(self, *given: nn.Module | torch.optim.Optimizer) -> Any:
        """Prepare models and optimizers for device, precision and strategy.

        Return what was given, prepared, in the same order: the model to call, or ``(model, optimizer, …)``. A model computes
        under the precision's context and converts 16-bit outputs to float32, so that losses are computed in float32. Its
        attributes and methods are those of the given module, which is ``model.module``.

        Several models and optimizers are set up in one call or several; an optimizer together with its models, or after
        them. A loss with parameters is a model too.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu", precision="bf16")
            >>> net, critic = torch.nn.Linear(4, 1), torch.nn.Linear(1, 1)
            >>> model, optimizer = runtime.setup(net, torch.optim.AdamW(net.parameters()))
            >>> model(torch.randn(8, 4)).dtype
            torch.float32
            >>> critic = runtime.setup(critic)
            >>> both = runtime.setup(torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1))

        Raises:
            TypeError: an argument is something else.
            ValueError: a model was set up before; or an optimizer holds no parameters, or some of no model that was set up.
        """
        optimizers = [each for each in given if not isinstance(each, nn.Module)]
        checks.check_optimizers(optimizers)
        if not given:
            raise WrongType("setup was given nothing. Write model, optimizer = runtime.setup(model, optimizer).")
        modules = [each for each in given if isinstance(each, nn.Module)]
        models = [each.module if isinstance(each, PreparedModel) else each for each in modules]
        known = {*self._optimizers.roots}
        before = [list(model.parameters()) for model in models]
        for model, mine in zip(models, before, strict=True):
            model_placement.check_model(model, self.device.type, self.strategy.materializes)
            if not known.isdisjoint(mine):
                raise WrongValue(_TWICE.format(type(model).__name__))
            known.update(mine)
        names = " and ".join(type(model).__name__ for model in models) or "a model that was set up"
        for optimizer in optimizers:
            check_parameters(optimizer, known, names, SET_UP_ALL)
        converted = [self.convert(model) for model in models]
        for optimizer in optimizers:
            self.bus.check_optimizer(optimizer)
        called = []
        for model, module, mine in zip(models, converted, before, strict=True):
            root = self.bus.prepare_model(module, self.precision)
            called.append(PreparedModel(model, Owner(self.bus, self._gradients, self.strategy, model, root)))
            self._first_step.watch(model, root)
            # A strategy that shards parameters replaces them.
            self._optimizers.add_model(root, [*mine, *model.parameters()])
        stepped = [self.bus.prepare_optimizer(optimizer) for optimizer in optimizers]
        for optimizer in stepped:
            self._optimizers.add(optimizer)
        sources = {True: iter(called), False: iter(stepped)}
        prepared = [next(sources[isinstance(each, nn.Module)]) for each in given]
        return prepared[0] if len(prepared) == 1 else checks.Prepared(prepared)

    @understood
    def prepare(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return a converted module and its optimizers, prepared by the strategy."""
        checks.check_optimizers(optimizers)
        return super().prepare(module, optimizers)

    @explained
    def setup_data(self, loader: Iterable[Any], *, train: bool = True, global_batch: int | None = None) -> PreparedData:
        """Return this rank's batches of ``loader``, on the device.

        ``global_batch`` is for training data only, and described in `hocket.Trainer`. Raises ValueError if it is not possible.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu")
            >>> dataset = torch.utils.data.TensorDataset(torch.randn(64, 4))
            >>> loader = runtime.setup_data(torch.utils.data.DataLoader(dataset, batch_size=8), global_batch=32)
            >>> len(loader)
            2
        """
        if global_batch is not None and not train:
            raise WrongValue(f"global_batch={global_batch} is for training data only. Omit it, or omit train=False.")
        check_batches(loader, "loader")
        return PreparedData(self, loader, prepared(loader, self.bus.prepare_data, train, global_batch), train)

    # --- a step, complete

    @explained
    def stepper(
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        microbatch: int | None = None,
        clip: float | tuple[Literal["norm", "value", "adaptive"], float] | None = None,
        nonfinite: Policy = "raise",
        **named: torch.optim.Optimizer,
    ) -> LoopSteps:
        """Return ``step(loss_function, batch, *names)``, which takes steps as in a `hocket.Task.train_batch`.

        It does everything between two batches: microbatches with exact weights, means over ranks, a loss scale for each step,
        clipping, the guard against non-finite values. See `hocket.loop.steps.Steps` for its arguments and its result.

        Args:
            model: as `setup` returned it. Several networks are parts of one, such as an `nn.ModuleDict`. Loss functions may
                call it or its parts; under FSDP, parts are called in loss functions only. A `hocket.Task` may also define how
                to count, split and join its batches.
            optimizers, named: as `setup` returned them, to step by name or by number: ``"generator"``, or ``"0"``.
            microbatch: samples per forward pass; None for the full batch.
            clip: the largest norm of a step's gradients, or a kind and a threshold, as ``clip_gradients`` of `hocket.Trainer`.
            nonfinite: as in `hocket.Trainer`, for each step. Devices that compute asynchronously report non-finite losses
                every 10 steps, and before `save`.

        Raises:
            TypeError, ValueError: an argument is invalid, or the strategy cannot step one optimizer of several.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu")
            >>> nets = torch.nn.ModuleDict({"g": torch.nn.Linear(4, 2), "d": torch.nn.Linear(2, 1)})
            >>> adam = [torch.optim.Adam(each.parameters()) for each in nets.values()]
            >>> model, generator, critic = runtime.setup(nets, *adam)
            >>> step = runtime.stepper(model, generator=generator, critic=critic, microbatch=8, clip=1.0)
            >>> def critic_loss(batch):
            ...     return nets["d"](batch["fake"]).mean() - nets["d"](batch["real"]).mean()
            >>> def generator_loss(batch):
            ...     return -nets["d"](batch["fake"]).mean()
            >>> for real in runtime.setup_data([torch.randn(16, 2)] * 5):
            ...     fake = nets["g"](torch.randn(16, 4))
            ...     result = step(critic_loss, {"real": real, "fake": fake.detach()}, "critic")
            ...     result = step(generator_loss, {"fake": fake}, "generator")
            >>> result.taken
            True
        """
        others = {name: each for name, each in named.items() if not isinstance(each, torch.optim.Optimizer)}
        for name, each in others.items():
            if text := unknown("Runtime.stepper", name, each):
                raise WrongType(text)
        if optimizers and named and not others:
            raise WrongType(
                "stepper was given optimizers with and without names. Name all, as in stepper(model, critic=critic), or none."
            )
        given = named or {str(number): optimizer for number, optimizer in enumerate(optimizers)}
        from hocket_strategies.custom_loops.loop_steps import make_steps

        step = make_steps(self, model, given, microbatch, clip, nonfinite)
        self._first_step.end(inner(model))
        for optimizer in given.values():
            self._optimizers.allow_step(optimizer)
        self._steppers.append(step)
        return step

    # --- the parts of a step

    @explained
    @contextmanager
    def accumulate(self, model: nn.Module, last: bool = True) -> Iterator[None]:
        """Accumulate gradients: use as the context of forward and backward of each microbatch.

        Ranks exchange gradients only in the ``last`` microbatch before a step. The step uses the weighted mean over all blocks
        since the model's previous step, so do not divide losses by the number of microbatches. Losses within one block add up.
        Nest the blocks of models with a common loss.

        After the last block, all ranks receive rank 0's buffers, such as the running statistics of batch norm. Without this
        context, ranks exchange gradients in every backward, and buffers are not synchronized.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu")
            >>> model, optimizer = runtime.setup(net := torch.nn.Linear(1, 1), torch.optim.SGD(net.parameters(), lr=0.1))
            >>> for number, inputs in enumerate(torch.ones(4, 8, 1)):
            ...     with runtime.accumulate(model, last=number == 3):
            ...         runtime.backward(model(inputs).square().mean())
            >>> runtime.step(optimizer)
            True
        """
        if not isinstance(model, PreparedModel):
            checks.refuse_model(model)
        module = inner(model)
        with self._gradients.block(module, last), self.bus.accumulate(module, last):
            yield

    @explained
    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        *,
        retain_graph: bool | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Add the gradients of a mean loss to those since the last step; see `accumulate` for the mean over microbatches.

        The gradients of several losses add up: ``backward(a); backward(b)`` is ``backward(a + b)``, for one model or several.

        Args:
            loss: a scalar, the mean over the batch.
            weight: the number of elements in that mean; None for the samples of this rank's latest batch from `setup_data`,
                or 1. A loss of weight 0 does not count, even if it is NaN.
            retain_graph: whether another loss of the same forward pass follows.
            inputs: parameters to compute gradients of; None for all.

        Raises:
            RuntimeError: the weights within an `accumulate` block have other ratios than in previous blocks, or this is
                called after the block instead of within it.
        """
        ranks = self.strategy.data_ranks
        if weight is not None:
            if not weight >= 0:
                raise WrongValue(
                    f"backward was given weight={weight}, the number of elements in the mean. Write 0 or more."
                )
            mine, everyone = weight, self._sum(weight)
        else:
            mine, everyone = self._gradients.latest(ranks)
        factor = self._gradients.loss_factor(mine, everyone, ranks)
        try:
            self._gradients.begin_backward()
            with self.precision.backward_context():
                scaled = self.bus.scale_loss(loss if factor == 1 else loss * factor)
                scaled.backward(retain_graph=retain_graph, inputs=inputs)
        except Exception as error:
            from hocket.help import failures  # only needed for error messages

            failures.explain(error, "runtime.backward", loss, bool(self._steppers))
            raise
        finally:
            self._gradients.end_backward()
            if self._first_step.versions is not None:
                self._first_step.record(self._optimizers.roots)

    @explained
    def clip_gradients(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        norm: float | None = None,
        value: float | None = None,
    ) -> torch.Tensor | None:
        """Clip the gradients of ``optimizer`` by joint 2-norm or by value. Return the norm before clipping, if by norm.

        Raises ValueError unless exactly one of ``norm`` and ``value`` is given.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu")
            >>> net = torch.nn.Linear(4, 1)
            >>> model, optimizer = runtime.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
            >>> runtime.backward(model(torch.randn(8, 4)).square().mean())
            >>> norm = runtime.clip_gradients(model, optimizer, norm=1.0)
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            checks.check_optimizer(optimizer, "clip_gradients(model, optimizer, norm=1.0)")
        if (norm is None) == (value is None):
            raise WrongValue(
                f"clip_gradients was given norm={norm} and value={value}; give one of them. Write "
                "runtime.clip_gradients(model, optimizer, norm=1.0)."
            )
        self._optimizers.finish(self, optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if norm is not None:
            return clip_gradients(parameters, "norm", norm)
        assert value is not None
        return clip_gradients(parameters, "value", value)

    @explained
    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step and set gradients to None. Return False if the precision skipped the step because gradients overflowed."""
        if self._optimizers.finish(self, optimizer):
            self._optimizers.allow_step(optimizer)
        self.bus.overflowed(self.bus.all_reduce)
        stepped: bool = self.bus.step_optimizer(optimizer, closure_for(optimizer, lambda: None, _no_closure))
        optimizer.zero_grad(set_to_none=True)
        self.device_kind.batch_end()
        return stepped

    # --- states

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the full weights under the names of the original model, on every rank, for any strategy."""
        return dict(self.bus.model_state(inner(model)))

    def load_model_state(self, model: nn.Module, state_dict: dict[str, Any]) -> None:
        """Load weights as `model_state` returns them. Raises RuntimeError for missing or unexpected keys."""
        self.bus.load_model_state(inner(model), state_dict)

    def model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the model that holds an optimizer's parameters, or the first of several, as the strategy prepared it.

        Raises ValueError if it holds parameters of no model that was set up.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu")
            >>> model, optimizer = runtime.setup(net := torch.nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.1))
            >>> runtime.model_of(optimizer) is net
            True
        """
        return self._optimizers.root_of(optimizer)

    @understood
    def save(self, path: str | Path, **things: Any) -> None:
        """Write a checkpoint folder, with the RNG states of all ranks and the loss scale.

        ``things`` are saved by name: models, optimizers, objects with a ``state_dict``, and numbers, strings, tensors, lists
        and dicts. All ranks have to call it; each writes its shards, and rank 0 the rest.

        Raises:
            CheckpointError: the checkpoint could not be written; raised on all ranks.
            FloatingPointError: a `stepper` with ``nonfinite="raise"`` recorded a non-finite loss.

        Example:
            >>> import hocket, tempfile, torch
            >>> runtime = hocket.Runtime(device="cpu")
            >>> model = runtime.setup(torch.nn.Linear(4, 1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     runtime.save(f"{folder}/epoch-1", model=model, epoch=1)
            ...     rest = runtime.load(f"{folder}/epoch-1", model=model)
            >>> rest
            {'epoch': 1}
        """
        checks.check_folder(path, "save")
        for step in self._steppers:
            step.report()
        saving.save(self, Path(path), things)

    @understood
    def load(self, path: str | Path, **things: Any) -> dict[str, Any]:
        """Load a checkpoint into the given objects by name, restore RNG states and loss scale, and return the other values.

        Raises:
            ValueError: it was saved under another precision that has state.
            CheckpointError: there is no such checkpoint, it is damaged, or does not contain one of ``things``.
            TypeError: one of ``things`` has no ``load_state_dict``.
        """
        checks.check_folder(path, "load")
        return saving.load(self, Path(path), things)

    def close(self) -> None:
        """Leave the process group. Called automatically when the Runtime is garbage-collected."""
        self.strategy.shutdown()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(attributes.missing("Runtime", name, self), name=name, obj=self)

    # --- internals

    def _sum(self, weight: float) -> float:
        if self.world_size == 1:
            return weight
        return self.bus.all_reduce(torch.tensor(weight, dtype=torch.float64), "sum").item() / replicas(self.strategy)


_TWICE = (
    "{} has parameters of a model that was set up before. Use what setup returned then, and set up optimizers together with "
    "their models, or later: optimizer = runtime.setup(optimizer). Models that share parameters are set up as one, such as "
    "torch.nn.ModuleDict({{'generator': …, 'critic': …}})."
)


def _no_closure() -> torch.Tensor:
    raise WrongState(
        "This optimizer computes gradients again within its step, so it needs a closure. Call optimizer.step(closure) "
        "yourself, or train with hocket.Trainer."
    )
