"""The layer below the Trainer: processes, device, precision and strategy, for custom training loops."""

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
from hocket.help import failures
from hocket.help.arguments import understood
from hocket.hookspecs import Event
from hocket.hookspecs.actions import Actions
from hocket.optim.clipping import clip_gradients
from hocket.parts import Parts, resolve
from hocket.plugins import switches
from hocket.plugins.bus import Bus
from hocket.training import seeding
from hocket.training.accumulation import Gradients


class Runtime:
    """Join the other processes and prepare models, optimizers and data for a custom training loop.

    Gradients accumulate between steps, as in PyTorch. ``backward`` takes the mean of each loss over ranks, weighted by the
    samples of their batches. `accumulate` takes the mean over microbatches, however unevenly samples are distributed.
    With one process and no microbatches, the result is bitwise identical to a plain PyTorch loop.

    Args:
        strategy, precision, device, devices: as in `hocket.Trainer`.
        seed: seed of the global random number generators, plus the rank; None leaves them unchanged.
        plugins: restricts the installed plug-ins: False for core's plug-ins only, or a list of names.

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
        """Make a Runtime from resolved parts, for the Trainer, without seeding. ``given`` has to be identical on all ranks."""
        runtime = cls.__new__(cls)
        runtime._join(parts, bus, devices, given)
        return runtime

    def _join(self, parts: Parts, bus: Bus, devices: int | None, given: comparison.Given) -> None:
        self.bus = bus
        self.strategy, self.precision, self.device_kind = parts.strategy, parts.precision, parts.device
        if devices is not None and devices > 1:
            launching.start(devices)
        #: The device of this rank.
        self.device: torch.device = bus.setup_environment(parts.device)
        bus.on_rank(self.strategy.rank)
        self.precision.device = self.device
        comparison.over_ranks(bus, self.world_size, {**comparison.of_plugins(parts.attachments), **given})
        self._gradients = Gradients()
        weakref.finalize(self, parts.strategy.shutdown)

    # --- ranks

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.strategy.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.strategy.world_size

    # --- set-up

    @understood
    def setup(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        """Prepare a model, and optimizers if given, for device, precision and strategy.

        Return the model to call, or ``(model, optimizer, …)``. The returned model computes under the precision's context and
        converts 16-bit outputs to float32, so that losses are computed in float32. The given module is ``model.module``.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu", precision="bf16")
            >>> net = torch.nn.Linear(4, 1)
            >>> model, optimizer = runtime.setup(net, torch.optim.AdamW(net.parameters()))
            >>> model(torch.randn(8, 4)).dtype
            torch.float32
        """
        placement.check_model(model, self.device.type, self.strategy.materializes)
        module, prepared = self.prepare(self.convert(model), optimizers)
        called = PreparedModel(self, model, module)
        return (called, *prepared) if optimizers else called

    def convert(self, module: Any) -> Any:
        """Move the module to the device, and convert it to the storage dtypes of the precision."""
        return self.bus.convert_module(self.place(module))

    def place(self, module: Any) -> Any:
        """Move the module to the device, unless the strategy moves it part by part."""
        return module if self.strategy.places else placement.move(module, self.device)

    @understood
    def prepare(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return a converted module and its optimizers, prepared by the strategy."""
        _check_optimizers(optimizers)
        for optimizer in optimizers:
            self.bus.check_optimizer(optimizer)
        prepared = self.bus.prepare_model(module, self.precision)
        return prepared, [self.bus.prepare_optimizer(optimizer) for optimizer in optimizers]

    def setup_data(self, loader: Iterable[Any], train: bool = True, *, global_batch: int | None = None) -> PreparedData:
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
            raise ValueError(f"global_batch={global_batch} is for training data only. Omit it, or omit train=False.")
        check_batches(loader, "loader")
        return PreparedData(self, self.bus.prepare_data(loader, train, global_batch), train)

    # --- a step

    @contextmanager
    def accumulate(self, model: nn.Module, last: bool = True) -> Iterator[None]:
        """Accumulate gradients: use as the context of forward and backward of each microbatch.

        Ranks exchange gradients only in the ``last`` microbatch before a step. The step uses the weighted mean over all blocks
        since the model's previous step. Losses within one block add up. Nest the blocks of models with a common loss.

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
        inner = _inner(model)
        with self._gradients.block(inner), self.bus.accumulate(inner, last):
            yield

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add the gradients of a mean loss to those since the last step; see `accumulate` for the mean over microbatches.

        Args:
            loss: a scalar, the mean over the batch.
            weight: the number of elements in that mean; None for the samples of this rank's latest batch from `setup_data`,
                or 1. A loss of weight 0 does not count, even if it is NaN.

        Raises:
            RuntimeError: the weights within an `accumulate` block have other ratios than in previous blocks, or this is
                called after the block instead of within it.
        """
        ranks = self.strategy.data_ranks
        if weight is not None:
            mine, everyone = weight, self._sum(weight)
        else:
            mine, everyone = self._gradients.batch or (1.0, float(ranks))
        factor = self._gradients.loss_factor(mine, everyone, ranks)
        try:
            with self.precision.backward_context():
                self.bus.scale_loss(loss if factor == 1 else loss * factor).backward()
        except Exception as error:
            failures.explain_backward(error, loss)
            raise

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
        """Step and set gradients to None. Return False if the precision skipped the step because gradients overflowed."""
        self._gradients.finish(self.bus, optimizer)
        self.bus.overflowed(self.bus.all_reduce)
        stepped: bool = self.bus.step_optimizer(optimizer, _no_closure)
        optimizer.zero_grad(set_to_none=True)
        self.device_kind.batch_end()
        return stepped

    # --- collectives

    def all_reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Return the mean, sum, min or max of a tensor over ranks.

        Example:
            >>> import hocket, torch
            >>> runtime = hocket.Runtime(device="cpu")
            >>> runtime.all_reduce(torch.tensor(0.5), "mean")
            tensor(0.5000)
        """
        reduced: torch.Tensor = self.bus.all_reduce(tensor, op)
        return reduced

    def all_gather(self, item: Any) -> list[Any]:
        """Return the picklable objects of all ranks, by rank."""
        return list(self.bus.all_gather_object(item))

    def broadcast(self, item: Any) -> Any:
        """Return rank 0's picklable object on every rank."""
        return self.bus.broadcast_object(item)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.bus.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if self.rank == 0:
            print(*values, **options)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the full weights under the names of the original model, on every rank, for any strategy."""
        return dict(self.bus.model_state(_inner(model)))

    def load_model_state(self, model: nn.Module, state_dict: dict[str, Any]) -> None:
        """Load weights as `model_state` returns them. Raises RuntimeError for missing or unexpected keys."""
        self.bus.load_model_state(_inner(model), state_dict)

    def save(self, path: str | Path, **things: Any) -> None:
        """Write a checkpoint folder (see `hocket.checkpoints.format`), with the RNG states of all ranks and the loss scale.

        ``things`` are saved by name: models, optimizers (together with exactly one model), objects with a ``state_dict``, and
        numbers, strings, tensors, lists and dicts. All ranks have to call it; each writes its shards, and rank 0 the rest.

        Raises:
            CheckpointError: the checkpoint could not be written; raised on all ranks.

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
        from hocket.checkpoints.storage import format

        tree = {name: encode(self._state_of(thing, things), name, gather=False) for name, thing in things.items()}
        random = [encode(each) for each in self.all_gather(seeding.capture())]
        content = {"things": tree, "random": random, "precision": encode(self.precision.state_dict())}
        format.write(Path(path), content, {"kind": "runtime"}, Ranks(self.rank, self.world_size, self.all_gather))

    def load(self, path: str | Path, **things: Any) -> dict[str, Any]:
        """Load a checkpoint into the given objects by name, restore RNG states and loss scale, and return the other values.

        Raises:
            ValueError: it was saved under another precision that has state.
            CheckpointError: there is no such checkpoint, it is damaged, or does not contain one of ``things``.
        """
        from hocket.checkpoints.storage import format

        saved = format.read(Path(path))
        kept = {name: decode(value) for name, value in saved["things"].items()}
        if missing := sorted(things.keys() - kept.keys()):
            raise CheckpointError(
                f"{path} does not contain {', '.join(missing)}. It contains: {', '.join(sorted(kept)) or 'nothing'}."
            )
        # Models first: sharded optimizers read their parameters.
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
        """Leave the process group. Called automatically when the Runtime is garbage-collected."""
        self.strategy.shutdown()

    def _sum(self, weight: float) -> float:
        if self.world_size == 1:
            return weight
        duplicates = self.world_size // self.strategy.data_ranks  # ranks with the same slice have the same weight
        return self.bus.all_reduce(torch.tensor(weight, dtype=torch.float64), "sum").item() / duplicates


class PreparedModel(nn.Module):
    """A model prepared by `Runtime.setup`; ``module`` is the original model."""

    def __init__(self, runtime: Runtime, given: nn.Module, prepared: nn.Module) -> None:
        super().__init__()
        self.module = given
        self._bus, self._gradients = runtime.bus, runtime._gradients
        vars(self)["_prepared"] = prepared  # not registered as a submodule, which would duplicate the parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the prepared model under the precision's context, and convert 16-bit outputs to float32."""
        with self._bus.forward_context():
            outputs = vars(self)["_prepared"](*args, **kwargs)
        return batches.map_tensors(self._convert_output, outputs)

    def _convert_output(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in _HALF:
            tensor = tensor.float()
        if tensor.grad_fn is not None:  # otherwise it may be a parameter, which would accumulate hooks
            tensor.register_hook(self._gradients.gate)
        return tensor


_HALF = (torch.float16, torch.bfloat16)


class PreparedData:
    """Iterate over the batches of this rank, on its device.

    A rank without a slice of a batch repeats a batch as padding, with ``samples`` 0: in training, where `Runtime.backward`
    gives it weight 0, and in evaluation under strategies whose ranks compute together, such as fsdp.
    """

    def __init__(self, runtime: Runtime, data: Iterable[Any], train: bool) -> None:
        self._runtime, self._data, self._train = runtime, data, train
        self._current: tuple[Any, bool] = (None, False)

    @property
    def samples(self) -> int:
        """Number of real samples in the current batch on this rank; 0 for a padding batch."""
        batch, counts = self._current
        return batches.count(batch).samples if counts else 0

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # len() raises TypeError if the data has no length

    def __iter__(self) -> Iterator[Any]:
        runtime = self._runtime
        for batch in self._data:
            self._current = batch, counts = batches.unpadded(batch)
            if self._train:
                mine = self.samples
                runtime._gradients.batch = (mine, runtime._sum(mine))
            elif not counts:
                warnings.warn(_REPEATED, stacklevel=2)
            yield runtime.bus.convert_batch(batches.move(batch, runtime.device))
            runtime.device_kind.batch_end()

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of samplers and data sets that define it."""
        set_epoch(self._data, epoch)


_REPEATED = (
    "This rank has no slice of the batch and repeats a batch as padding, because all ranks have to compute. Weight results by "
    "`data.samples` of the object that setup_data returned: it is 0 for a padding batch."
)


def _inner(model: nn.Module) -> nn.Module:
    prepared: nn.Module = vars(model)["_prepared"] if isinstance(model, PreparedModel) else model
    return prepared


def _check_optimizers(given: Any) -> None:
    for each in [given] if isinstance(given, torch.optim.Optimizer) or not isinstance(given, Sequence) else given:
        if each is given or not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"setup was given {type(each).__name__} among the optimizers, which are torch.optim.Optimizer. Write "
                "model, optimizer = runtime.setup(model, optimizer), and data = runtime.setup_data(loader)."
            )


def _check_own_loop(parts: Parts) -> None:
    hooks = [*(event.value for event in Event), *(name for name in vars(Actions) if not name.startswith("_"))]
    for argument, part in (("strategy", parts.strategy), ("precision", parts.precision)):
        # A custom loop splits its batches itself.
        used = [name for name in hooks if hasattr(type(part), name) and name != "split_batch"]
        if used and not getattr(part, "own_loop", False):
            raise ValueError(
                f"{argument} {type(part).__name__} acts on {', '.join(used)}, which only the Trainer's loop has. Train with "
                f"hocket.Trainer, or give hocket.Runtime another {argument}, such as "
                f"{'auto' if argument == 'strategy' else 'bf16'}."
            )


def _only_model(things: Mapping[str, Any]) -> nn.Module:
    models = [thing for thing in things.values() if isinstance(thing, nn.Module)]
    if len(models) != 1:
        raise ValueError(
            f"The state of an optimizer belongs to exactly one model, but {len(models)} were given. Give one, such as "
            "save(path, model=model, optimizer=optimizer), and save other pairs in separate checkpoints."
        )
    return models[0]


def _no_closure() -> torch.Tensor:
    raise RuntimeError(
        "This optimizer computes gradients again within its step, so it needs a closure. Call optimizer.step(closure) "
        "yourself, or train with hocket.Trainer."
    )
