"""The layer below the Trainer: processes, device, precision and strategy, for loops of your own."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket import launching
from hocket.checkpoints import CheckpointError
from hocket.checkpoints.storage.plain import decode, encode
from hocket.checkpoints.storage.ranks import Ranks
from hocket.data import batches
from hocket.data.checks import check_batches
from hocket.data.source import set_epoch
from hocket.devices import placement
from hocket.distributed import comparison
from hocket.hookspecs import Event
from hocket.hookspecs.actions import Actions
from hocket.optim.clipping import clip_gradients
from hocket.parts import Parts, resolve
from hocket.plugins import switches
from hocket.plugins.bus import Bus
from hocket.training import seeding
from hocket.training.accumulation import Gradients


class Runtime:
    """Joins the other processes and prepares models, optimizers and data for them; the loop is yours.

    Gradients add up between steps, as in PyTorch. ``backward`` takes the mean of each loss over ranks, weighted by the samples
    of their batches, and `accumulate` makes the mean over microbatches, however unevenly they are shared out. One process
    without microbatches is bitwise identical to a plain loop.

    Args:
        strategy, precision, device, devices: as in `hocket.Trainer`.
        seed: for the process's random numbers, plus the rank; None leaves them alone.
        plugins: restricts which installed plug-ins may be used: False for core's own, or a list of names.

    Raises:
        hocket.plugins.PluginError: a plug-in is not there, or is broken.
        TypeError, ValueError: an argument cannot be understood; the message says which and what to write. Or strategy or
            precision acts on events of the Trainer's loop, which a loop of one's own does not have.
    """

    def __init__(
        self,
        *,
        strategy: Any = "auto",
        precision: Any = "fp32",
        device: Any = "auto",
        devices: int | None = None,
        seed: int | None = None,
        plugins: bool | list[str] | None = None,
    ) -> None:
        with switches.use(plugins):
            parts = resolve(strategy=strategy, precision=precision, device=device, devices=devices)
        _check_own_loop(parts)
        self._join(parts, Bus(parts.attachments), devices, {})
        if seed is not None:
            seeding.seed_everything(seed + self.strategy.data_rank)

    @classmethod
    def of(cls, parts: Parts, bus: Bus, devices: int | None, given: comparison.Given) -> Runtime:
        """Of parts that were resolved already, as the Trainer's; seeds nothing. ``given`` has to be the same on all ranks."""
        runtime = cls.__new__(cls)
        runtime._join(parts, bus, devices, given)
        return runtime

    def _join(self, parts: Parts, bus: Bus, devices: int | None, given: comparison.Given) -> None:
        self.bus = bus
        self.strategy, self.precision, self.device_kind = parts.strategy, parts.precision, parts.device
        if devices is not None and devices > 1:
            launching.start(devices)
        #: Where this rank computes.
        self.device: torch.device = bus.setup_environment(parts.device)
        bus.on_rank(self.strategy.rank)
        self.precision.device = self.device
        comparison.over_ranks(bus, self.world_size, {**comparison.of_plugins(parts.attachments), **given})
        self._gradients = Gradients()
        weakref.finalize(self, parts.strategy.shutdown)

    # --- who is who

    @property
    def rank(self) -> int:
        """Which of the processes this is, from 0."""
        return self.strategy.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.strategy.world_size

    # --- set-up

    def setup(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        """The model to call, or ``(model, optimizer, …)``, moved, converted and wrapped as precision and strategy want it.

        What is called computes under the precision's context, and hands out 16-bit results as float32, so that losses are
        computed in float32. The module itself stays ``model.module``.
        """
        placement.check_model(model, self.device.type, self.strategy.materializes)
        module, prepared = self.prepare(self.convert(model), optimizers)
        called = PreparedModel(self, model, module)
        return (called, *prepared) if optimizers else called

    def convert(self, module: Any) -> Any:
        """The module on the device, in the dtypes that the precision stores it in."""
        return self.bus.convert_module(self.place(module))

    def place(self, module: Any) -> Any:
        """The module on the device, unless the strategy moves it part by part."""
        return module if self.strategy.places else placement.move(module, self.device)

    def prepare(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """A converted module and its optimizers as the strategy wants them."""
        for optimizer in optimizers:
            self.bus.check_optimizer(optimizer)
        prepared = self.bus.prepare_model(module, self.precision)
        return prepared, [self.bus.prepare_optimizer(optimizer) for optimizer in optimizers]

    def setup_data(self, loader: Iterable[Any], train: bool = True, *, global_batch: int | None = None) -> PreparedData:
        """This rank's batches of ``loader``, on the device; see `hocket.Trainer` on ``global_batch``, for training data only.

        Raises ValueError if that cannot be had.
        """
        if global_batch is not None and not train:
            raise ValueError(f"global_batch={global_batch} is for training data. Leave it out, or train=False.")
        check_batches(loader, "loader")
        return PreparedData(self, self.bus.prepare_data(loader, train, global_batch), train)

    # --- a step

    @contextmanager
    def accumulate(self, model: nn.Module, last: bool = True) -> Iterator[None]:
        """Around forward and backward of a microbatch; ranks exchange gradients only in the ``last`` one before a step.

        A step is taken with the weighted mean over these blocks since the model's previous step. Losses within one block add
        up. Nest the blocks of models that share a loss.

        After the last one rank 0's buffers, as the running statistics of batch norm, become those of all ranks. A loop that
        does without this context exchanges gradients in every backward, and each rank's buffers stay its own.

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
        inner = _inner(model)
        with self._gradients.block(inner), self.bus.accumulate(inner, last):
            yield

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add the gradients of a mean loss to those since the last step; see `accumulate` for the mean over microbatches.

        Args:
            loss: a scalar, the mean over the batch.
            weight: what that mean is over; None for the samples of this rank's latest batch from `setup_data`, or 1. A loss
                of weight 0 counts nothing, even if it is NaN.

        Raises:
            RuntimeError: weights within an `accumulate` block relate otherwise than in the blocks before, or this is called
                after the block instead of within it.
        """
        ranks = self.strategy.data_ranks
        if weight is not None:
            mine, everyone = weight, self._sum(weight)
        else:
            mine, everyone = self._gradients.batch or (1.0, float(ranks))
        share = self._gradients.loss_factor(mine, everyone, ranks)
        with self.precision.backward_context():
            self.bus.scale_loss(loss if share == 1 else loss * share).backward()

    def clip_gradients(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        norm: float | None = None,
        value: float | None = None,
    ) -> torch.Tensor | None:
        """Clip what ``optimizer`` is about to step with, by joint 2-norm or by value; the norm before clipping, if by norm.

        Raises ValueError unless exactly one of ``norm`` and ``value`` is given.
        """
        if (norm is None) == (value is None):
            raise ValueError(
                f"clip_gradients was given norm={norm} and value={value}; give one of them, such as norm=1.0."
            )
        self._gradients.finish(self.bus, optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if norm is not None:
            return clip_gradients(parameters, "norm", norm)
        assert value is not None
        return clip_gradients(parameters, "value", value)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step and set gradients to None; False if the precision left the step out because scaled gradients overflowed."""
        self._gradients.finish(self.bus, optimizer)
        self.bus.overflowed(self.bus.all_reduce)
        stepped: bool = self.bus.step_optimizer(optimizer, _no_closure)
        optimizer.zero_grad(set_to_none=True)
        self.device_kind.batch_end()
        return stepped

    # --- the others

    def all_reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Mean, sum, min or max over ranks."""
        reduced: torch.Tensor = self.bus.all_reduce(tensor, op)
        return reduced

    def all_gather(self, item: Any) -> list[Any]:
        """One picklable object of every rank, by rank."""
        return list(self.bus.all_gather_object(item))

    def broadcast(self, item: Any) -> Any:
        """Rank 0's picklable object, on every rank."""
        return self.bus.broadcast_object(item)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.bus.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """``print``, on rank 0."""
        if self.rank == 0:
            print(*values, **options)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The full weights under the model's own names, on every rank, whatever the strategy."""
        return dict(self.bus.model_state(_inner(model)))

    def load_model_state(self, model: nn.Module, state_dict: dict[str, Any]) -> None:
        """Undo `model_state`. Raises RuntimeError for keys that do not fit."""
        self.bus.load_model_state(_inner(model), state_dict)

    def save(self, path: str | Path, **things: Any) -> None:
        """Write a checkpoint folder (see `hocket.checkpoints.format`), with all ranks' random numbers and the loss scale.

        ``things`` are kept by name: models, optimizers (together with exactly one model), whatever has a ``state_dict``, and
        numbers, strings, tensors, lists and dicts. Every rank calls it and writes its shards; rank 0 writes the rest.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        from hocket.checkpoints.storage import format

        tree = {name: encode(self._state_of(thing, things), name, gather=False) for name, thing in things.items()}
        random = [encode(each) for each in self.all_gather(seeding.capture())]
        content = {"things": tree, "random": random, "precision": encode(self.precision.state_dict())}
        format.write(Path(path), content, {"kind": "runtime"}, Ranks(self.rank, self.world_size, self.all_gather))

    def load(self, path: str | Path, **things: Any) -> dict[str, Any]:
        """Undo `save`: load what is given here by name, continue random numbers and loss scale, and return the rest.

        Raises:
            ValueError: it was saved under another precision, with a state of its own.
            CheckpointError: there is no such checkpoint, it is damaged, or does not hold one of ``things``.
        """
        from hocket.checkpoints.storage import format

        saved = format.read(Path(path))
        kept = {name: decode(value) for name, value in saved["things"].items()}
        if missing := sorted(things.keys() - kept.keys()):
            raise CheckpointError(
                f"{path} does not hold {', '.join(missing)}. It holds: {', '.join(sorted(kept)) or 'nothing'}."
            )
        # Models first: sharded optimizers look at their parameters.
        for name, thing in sorted(things.items(), key=lambda item: not isinstance(item[1], nn.Module)):
            state = kept.pop(name)
            if isinstance(thing, nn.Module):
                self.load_model_state(thing, state)
            elif isinstance(thing, torch.optim.Optimizer):
                self.bus.load_optimizer_state(_inner(_only_model(things)), thing, state)
            else:
                thing.load_state_dict(state)
        self.precision.load_state_dict(decode(saved["precision"]))
        if self.rank < len(saved["random"]):
            seeding.restore(decode(saved["random"][self.rank]))
        return kept

    def _state_of(self, thing: Any, things: Mapping[str, Any]) -> Any:
        if isinstance(thing, nn.Module):
            return dict(self.bus.model_shards(_inner(thing)))
        if isinstance(thing, torch.optim.Optimizer):
            return self.bus.optimizer_shards(_inner(_only_model(things)), thing)
        return thing.state_dict() if hasattr(thing, "state_dict") else thing

    def close(self) -> None:
        """Leave the other processes. Happens by itself when the Runtime is forgotten."""
        self.strategy.shutdown()

    def _sum(self, weight: float) -> float:
        if self.world_size == 1:
            return weight
        alike = self.world_size // self.strategy.data_ranks  # ranks that compute on one share have the same weight
        return self.bus.all_reduce(torch.tensor(weight, dtype=torch.float64), "sum").item() / alike


class PreparedModel(nn.Module):
    """What `Runtime.setup` returns; ``module`` is the model that was given."""

    def __init__(self, runtime: Runtime, given: nn.Module, prepared: nn.Module) -> None:
        super().__init__()
        self.module = given
        self._bus, self._gradients = runtime.bus, runtime._gradients
        vars(self)["_prepared"] = prepared  # not a submodule: its parameters would be there twice

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The prepared model's, under the precision's context; 16-bit results as float32."""
        with self._bus.forward_context():
            outputs = vars(self)["_prepared"](*args, **kwargs)
        return batches.map_tensors(self._handed_out, outputs)

    def _handed_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in _HALF:
            tensor = tensor.float()
        if tensor.grad_fn is not None:  # else it may be a parameter, which would collect hooks
            tensor.register_hook(self._gradients.gate)
        return tensor


_HALF = (torch.float16, torch.bfloat16)


class PreparedData:
    """Batches of this rank on its device.

    A rank without a share of a batch repeats one: in training, where `Runtime.backward` gives it no weight, and in evaluation
    under strategies that compute together, such as fsdp. ``samples`` is then 0.
    """

    def __init__(self, runtime: Runtime, data: Iterable[Any], train: bool) -> None:
        self._runtime, self._data, self._train = runtime, data, train
        self._at_hand: tuple[Any, bool] = (None, False)

    @property
    def samples(self) -> int:
        """What the batch at hand counts for on this rank: its samples, or 0 if it only keeps the other ranks company."""
        batch, counts = self._at_hand
        return batches.count(batch).samples if counts else 0

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # TypeError is what len() raises if it has none

    def __iter__(self) -> Iterator[Any]:
        runtime = self._runtime
        for batch in self._data:
            self._at_hand = batch, counts = batches.unpadded(batch)
            if self._train:
                mine = self.samples
                runtime._gradients.batch = (mine, runtime._sum(mine))
            elif not counts:
                warnings.warn(_REPEATED, stacklevel=2)
            yield runtime.bus.convert_batch(batches.move(batch, runtime.device))
            runtime.device_kind.batch_end()

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of samplers and data sets that have it."""
        set_epoch(self._data, epoch)


_REPEATED = (
    "This rank has no share of the batch and repeats one, because all ranks have to compute. Count what a batch counts for by "
    "`data.samples`, of what setup_data returned: it is 0 now."
)


def _inner(model: nn.Module) -> nn.Module:
    prepared: nn.Module = vars(model)["_prepared"] if isinstance(model, PreparedModel) else model
    return prepared


def _check_own_loop(parts: Parts) -> None:
    hooks = [*(event.value for event in Event), *(name for name in vars(Actions) if not name.startswith("_"))]
    for argument, part in (("strategy", parts.strategy), ("precision", parts.precision)):
        # Whoever writes the loop cuts the batches.
        heard = [name for name in hooks if hasattr(type(part), name) and name != "split_batch"]
        if heard and not getattr(part, "own_loop", False):
            raise ValueError(
                f"{argument} {type(part).__name__} acts on {', '.join(heard)}, which only the Trainer's loop has. Train with "
                f"hocket.Trainer, or give hocket.Runtime another {argument}, such as "
                f"{'auto' if argument == 'strategy' else 'bf16'}."
            )


def _only_model(things: Mapping[str, Any]) -> nn.Module:
    models = [thing for thing in things.values() if isinstance(thing, nn.Module)]
    if len(models) != 1:
        raise ValueError(
            f"The state of an optimizer belongs to a model, and {len(models)} were given. Give one, such as "
            "save(path, model=model, optimizer=optimizer), and further pairs a checkpoint of their own."
        )
    return models[0]


def _no_closure() -> torch.Tensor:
    raise RuntimeError(
        "This optimizer computes gradients again within its step, which needs a closure. Call optimizer.step(closure) "
        "yourself, or train with hocket.Trainer."
    )
