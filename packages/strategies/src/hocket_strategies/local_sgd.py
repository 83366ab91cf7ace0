"""Local SGD: ranks step independently and average their parameters every few steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hocket import Device, State, Time, Unit, hookimpl
from hocket.errors import WrongValue
from hocket.optim.closures import needs_closure
from hocket_strategies.ddp import DDP
from hocket_strategies.tensor_coalescing import packed, unpack


class LocalSGD(DDP):
    """Step each rank with its own gradients, and average parameters over ranks every few steps.

    Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; with a warm-up it is the post-local SGD
    of Lin et al. 2018, arXiv 1808.07217. Parameters cross the network once in ``every`` steps, gradients never. A rank
    computes and clips the gradient of the mean loss over its slice of the batch; a rank without a slice does not step.
    ``state.loss`` is the mean over the global batch, as with every strategy.

    Floating-point buffers (running statistics of batch norm) are averaged along with the parameters; other buffers are
    copied from rank 0. Parameters are also averaged at the end of a fit. Evaluation, prediction and ``model_state`` use the
    average over ranks and restore each rank's own weights, so that a run trains the same whether it is evaluated or not.

    Args:
        every: optimizer steps between two averages; 1 averages after each.
        warmup: until this time, such as ``"500ba"`` or ``"0.1dur"``, gradients are averaged in every step, as in ``ddp``.
        average_optimizer: average the state of the optimizers whenever parameters are averaged (Yu et al. 2019, arXiv
            1905.03817). Otherwise each rank keeps its momenta, and only ``optimizer_state`` returns their average.
        **options: those of `DDP`, for dividing data and, in the warm-up, reducing gradients.

    Raises:
        ValueError: ``every`` is less than 1; later, for an optimizer that recomputes gradients (LBFGS).

    Example:
        >>> import hocket, hocket_strategies, torch
        >>> strategy = hocket_strategies.LocalSGD(every=8, warmup="500ba")
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, strategy=strategy, devices=2)  # doctest: +SKIP
    """

    def __init__(
        self,
        every: int = 8,
        *,
        warmup: str | Time = "0ba",
        average_optimizer: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if every < 1:
            raise WrongValue(
                f"local-sgd was given «every={every}», but it is the number of steps between two averages: give 1 or "
                "more, such as «every=8»."
            )
        self._every = every
        self._warmup = Time.parse(warmup)
        self._average_optimizer = average_optimizer
        self._device = torch.device("cpu")
        self._module: nn.Module | None = None
        #: Every parameter that was ever trained; an insertion-ordered set.
        self._trained: dict[nn.Parameter, None] = {}
        #: Whether any batch was local, and the number of local batches since the last average.
        self._was_alone = False
        self._since = 0
        #: This rank's own weights, while the model holds the average.
        self._own: list[Tensor] = []

    @property
    def _name(self) -> str:
        return "local-sgd"

    @property
    def _alone(self) -> bool:
        """Whether the current batch is local."""
        return not self.averages_gradients

    def setup_environment(self, device: Device) -> torch.device:
        """See :meth:`RankStrategy.setup_environment`."""
        self._device = super().setup_environment(device)
        return self._device

    # --- the model and its optimizers

    def prepare_model(self, module: nn.Module) -> nn.Module:
        """Broadcast rank 0's weights; with a warm-up, wrap the module as `DDP` does."""
        self._module = module
        self._trained = {}
        if self._warmup.value:
            return super().prepare_model(module)
        if self.world_size > 1:
            self._broadcast([*module.parameters(), *module.buffers()])
        return module

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer unchanged. Raises ValueError for one that recomputes gradients: ranks would deadlock."""
        if needs_closure(optimizer):
            raise WrongValue(
                f"{type(optimizer).__name__} recomputes the gradients of a batch a variable number of times, which differs "
                "between ranks that step independently. Use another optimizer, or «strategy='ddp'»."
            )
        return optimizer

    def accumulate(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Reduce over ranks only in the warm-up."""
        return super().accumulate(module, last and not self._alone)

    # --- the steps

    def batch_start(self, state: State) -> None:
        """Determine whether this batch is local."""
        if self.world_size == 1:
            return
        now = state.elapsed() if self._warmup.unit is Unit.DURATION else state.timestamp.count(self._warmup.unit)
        self.averages_gradients = now < self._warmup.value
        if self._alone and not self._since:
            self._was_alone, self._first_batch = True, False
            self._weights()  # includes parameters that are frozen before the next average

    def optimizer_step(self, state: State, closure: Callable[[], Tensor]) -> bool | None:
        """Skip the step of a rank without samples of a local batch; the others step as usual."""
        return True if self._alone and not state.rank_samples else None

    def batch_end(self, state: State) -> None:
        """Average if it is due."""
        if self._alone:
            self._since += 1
            if self._since >= self._every:
                self._synchronise(state)

    def fit_end(self, state: State) -> None:
        """Average after the remaining local steps."""
        if self._since:
            self._synchronise(state)

    def _synchronise(self, state: State) -> None:
        self._since = 0
        self._average(self._weights())
        if self._average_optimizer:
            for optimizer in state.optimizers:
                optimizer.load_state_dict(self._mean_state(optimizer.state_dict()))

    # --- evaluation, prediction and full weights: the average, without an effect on training

    @hookimpl(trylast=True)
    def eval_before_all(self) -> None:
        """Load the average over ranks; after algorithms, so that averages over time (EMA) are averaged."""
        self._load_average()

    def eval_after_all(self) -> None:
        """Restore this rank's own weights."""
        self._restore_own()

    @hookimpl(trylast=True)
    def predict_start(self) -> None:
        """Load the average over ranks."""
        self._load_average()

    def predict_end(self) -> None:
        """Restore this rank's own weights."""
        self._restore_own()

    def exception(self) -> None:
        """Restore this rank's own weights."""
        self._restore_own()

    def _load_average(self) -> None:
        if self._was_alone and not self._own:
            tensors = self._weights()
            self._own = [tensor.detach().clone() for tensor in tensors]
            self._average(tensors)

    @torch.no_grad()
    def _restore_own(self) -> None:
        own, self._own = self._own, []
        if own:
            for tensor, value in zip(self._weights(), own, strict=True):
                tensor.copy_(value)

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the average over ranks; as copies if this rank's own weights differ from it."""
        if not self._since or self._own:
            return super().model_state(module)
        self._load_average()
        try:
            average = super().model_state(module)
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in average.items()}
        finally:
            self._restore_own()

    def load_model_state(self, module: nn.Module, state_dict: dict[str, Any]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_model_state`. The next average is ``every`` steps away."""
        self._since = 0
        return super().load_model_state(module, state_dict)

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the average over ranks."""
        state: dict[str, Any] = optimizer.state_dict()
        return self._mean_state(state) if self._was_alone else state

    # --- averages

    def _weights(self) -> list[Tensor]:
        """Return the tensors that may differ between ranks, in the same order on all ranks."""
        assert self._module is not None
        self._trained.update((parameter, None) for parameter in self._module.parameters() if parameter.requires_grad)
        return [*self._trained, *self._module.buffers()]

    def _average(self, tensors: list[Tensor]) -> None:
        """Set tensors to their mean over ranks, summed in at least 32 bits; integers to rank 0's values."""
        for flat, packed_tensors in packed(tensor for tensor in tensors if _has_mean(tensor)):
            wide = flat.float() if flat.element_size() < 4 else flat
            unpack(self.all_reduce(wide, "mean"), packed_tensors)
        self._broadcast([tensor for tensor in tensors if not _has_mean(tensor)])

    def _mean_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer state with each tensor's mean over the ranks that have it; a rank that never stepped has none.
        Steps and other scalars come from the first rank that has them."""
        own = {(index, key): value for index, values in state_dict["state"].items() for key, value in values.items()}
        by_rank = self.all_gather_object({where: _described(value) for where, value in own.items()})
        known: dict[Any, Any] = {}
        for described in by_rank:
            known = described | known
        state: dict[Any, dict[str, Any]] = {}
        for (index, key), what in known.items():
            value = what
            if isinstance(what, _Kind):
                holders = sum((index, key) in described for described in by_rank)
                mine = own.get((index, key))
                mine = torch.zeros(what.shape, dtype=what.dtype, device=self._device) if mine is None else mine
                value = self.all_reduce(mine, "sum") / holders
            state.setdefault(index, {})[key] = value
        return {**state_dict, "state": state}


class _Kind(NamedTuple):
    """Shape and dtype of a tensor, for ranks that contribute zeros to its mean."""

    shape: torch.Size
    dtype: torch.dtype


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Kind(value.shape, value.dtype) if value.dim() and _has_mean(value) else value.detach().cpu()
    return value


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
