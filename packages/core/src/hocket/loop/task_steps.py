"""Take the steps of a task's `train_batch`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongState, WrongType
from hocket.help import warn
from hocket.loop import manual_steps
from hocket.loop.manual_steps import ByHand, ManualHooks
from hocket.loop.steps import StepResult, Steps
from hocket.state import scalars
from hocket.state.step import UserStep

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.basics.types import Batch
    from hocket.loop.nonfinite import NonFiniteGuard
    from hocket.state.state import State


class TaskSteps(Steps):
    """The ``step`` argument of `hocket.Task.train_batch`. One per Trainer.

    Args:
        take, compiled: see `Steps`.
        guard: handles non-finite losses and gradients of steps by hand.
        changed: called when something changed that a fit cannot compute anew after an exception.
    """

    caller = "train_batch"

    def __init__(
        self,
        state: State,
        take: Callable[[], bool],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
        guard: NonFiniteGuard,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(state, take, compiled)
        self._guard, self._changed = guard, changed
        #: The gradients of steps by hand, by the names of their optimizers; and those of the open block.
        self._by_hand: dict[tuple[str, ...], ByHand] = {}
        self._open_by_hand: ByHand | None = None
        #: The hooks of steps by hand, from the first block on.
        self._hooks: ManualHooks
        #: The batch that `train_batch` was given, and whether it counts.
        self._whole: Batch = None
        self._counts = False
        #: Whether `train_batch` is running.
        self._open = False
        #: The precision's context around `train_batch`; steps leave it.
        self._context: ExitStack
        #: Whether a step was called in the current batch.
        self._called = False
        #: Numbers of batches and of steps of each optimizer, by id, in the epoch so far; None after its first part was missed
        #: or its end was reached once.
        self._epoch: Counter[int | str] = Counter()

    @property
    def batch(self) -> int:
        """The number of the current batch, from 0, for steps that are not taken in every batch."""
        return self._state.timestamp.batch

    @property
    def batch_in_epoch(self) -> int:
        """The number of the current batch in its epoch, from 0, such as to begin each epoch without a carried state."""
        return self._state.timestamp.batch_in_epoch

    @contextmanager
    def manual(self, *optimizers: str) -> Iterator[ByHand]:
        """Take steps of the named optimizers, or all, by hand: call ``backward``, ``clip`` and ``step`` of the block's object.

        Parameters that only other optimizers hold get no gradients in the block. Gradients that no ``step()`` has used when the
        block ends wait for the next block of the same optimizers, also in later batches, and are in checkpoints.

        Raises:
            ValueError: there is no optimizer of that name, or two of these share parameters; it computes gradients itself
                (LBFGS); or ``microbatch=`` or ``accumulate=`` divide the batch.
            hocket.basics.plugin_errors.PlanError: the strategy shards parameters.
            RuntimeError: called outside of `train_batch`, in a loss function, or in another such block.

        Example:
            >>> import hocket, torch
            >>> class Autoencoder(hocket.Task):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.network = torch.nn.Linear(4, 4)
            ...     def train_batch(self, batch, step):
            ...         with step.manual() as by_hand:
            ...             by_hand.backward((self.network(batch) - batch).square().mean() / 2)
            ...             if step.batch % 2 == 1:  # a step on two batches
            ...                 by_hand.clip(norm=1.0)
            ...                 by_hand.step()
            >>> trainer = hocket.Trainer(
            ...     model=Autoencoder(), train_data=[torch.randn(8, 4)] * 4, optimizer="sgd(lr=0.1)", device="cpu"
            ... )
            >>> trainer.fit("1ep").timestamp.batch
            4
        """
        self._check_open()
        if self._busy:
            raise WrongState("step.manual(…) is called in train_batch, not in a loss function: return the loss there.")
        self._note_call()
        self._agree("manual", f"step.manual({', '.join(map(repr, optimizers))})", 0.0)
        block, state = self._gradients_by_hand(optimizers), self._state
        manual_steps.check(state, state.optimizers if block.current.optimizers is None else block.current.optimizers)
        if not hasattr(self, "_hooks"):
            self._hooks = ManualHooks(state, self._complete, self._compiled is not None)
        self._open_by_hand = block
        try:
            with block.opened(state.step):
                yield block
        finally:
            self._open_by_hand = None

    # --- what the loop calls

    def run(self, counts: bool) -> bool:
        """Call the task's `train_batch` with the current batch, and return whether an optimizer has stepped.

        Args:
            counts: False for a padding batch, on which this rank computes with weight 0.
        """
        state, bus = self._state, self._state.bus
        taken = self._taken = state.step.taken = Counter()
        self._counts = counts
        self._whole = whole = bus.move_batch(state, state.step.batch)
        self._open, self._called = True, False
        for parameter in state.parameters:
            parameter.grad = None
        try:
            with ExitStack() as self._context:
                self._context.enter_context(bus.forward_context())
                train_batch: Callable[..., Any] = state.task.train_batch
                returned = train_batch(whole, self)
            self._agree("return", "", 0.0)
            self._broadcast_buffers()
        except (TypeError, AttributeError) as error:
            from hocket.help import failures  # only needed for error messages

            failures.explain(error, "step", whole)
            raise
        finally:
            self._open, self._whole = False, None
        if returned is not None and not isinstance(returned, StepResult):
            raise WrongType(
                f"train_batch of {type(state.task).__name__} returned {type(returned).__name__}, which is not used for "
                "training. Call step(loss_function, batch) instead of returning a loss."
            )
        if not self._called and any(parameter.grad is not None for parameter in state.parameters):
            raise WrongState(
                f"train_batch of {type(state.task).__name__} computed gradients and called no step(…). Compute the loss in a "
                "loss function, step(self.loss_function, batch); or by hand in a block: with step.manual() as by_hand: "
                "by_hand.backward(loss); by_hand.step()."
            )
        self._check_weights()
        self._epoch.update(taken)
        self._epoch["batches"] += 1
        self._epoch["called"] += self._called
        state.step.batch = whole
        return bool(taken)

    def epoch_end(self) -> None:
        """Warn if no step was called in the epoch, or none of some optimizer in the first one."""
        state, epoch, self._epoch = self._state, self._epoch, Counter()
        kind = type(state.task).__name__
        if epoch["batches"] and not epoch["called"]:
            warn(
                f"train_batch of {kind} called step(…) in no batch of this epoch, so no optimizer has stepped. Call "
                "step(self.loss_function, batch) where it should train."
            )
        elif epoch["batches"] == state.timestamp.batch:  # the first epoch, from its beginning
            optimizers = zip(state.optimizer_names, state.optimizers, strict=True)
            idle = [name for name, optimizer in optimizers if not epoch[id(optimizer)]]
            if idle:
                warn(
                    f"train_batch of {kind} stepped {', '.join(map(repr, idle))} in no batch of the first epoch. Write step("
                    f"self.loss_function, batch, {idle[0]!r}) where it should train, or remove that optimizer."
                )

    def fit_end(self) -> None:
        """Warn of gradients that no step has used."""
        for names in self.waiting:
            warn(
                f"The fit ends with gradients of {', '.join(map(repr, names)) or 'all optimizers'} that no by_hand.step() has "
                "used. The next fit, or a run that resumes from a checkpoint, continues with them; otherwise they are lost."
            )

    @property
    def waiting(self) -> Mapping[tuple[str, ...], ByHand]:
        """The gradients by hand that wait for a step in a later batch, by the names of their optimizers."""
        return {names: block for names, block in self._by_hand.items() if block.gradients is not None}

    def restore(self, waiting: Mapping[tuple[str, ...], tuple[Sequence[Tensor | None], Mapping[str, Tensor]]]) -> None:
        """Continue with saved gradients and losses by hand, and no others."""
        self._by_hand = {}
        for names, (gradients, losses) in waiting.items():
            self._gradients_by_hand(names).restore(gradients, losses)

    # --- what `ByHand` calls, besides `changed`, `agree`, `report` and `hooks`

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Leave the precision's context around `train_batch`."""
        self._context.close()
        try:
            yield
        finally:
            self._context.enter_context(self._state.bus.forward_context())

    # --- inside

    def _gradients_by_hand(self, names: tuple[str, ...]) -> ByHand:
        indices = self._indices(names)
        if names not in self._by_hand:
            self._check_shared(indices)
            step = UserStep("+".join(names))
            self._by_hand[names] = ByHand(self._state, step, self._guard, self)
        self._choose(self._by_hand[names].current, indices)
        return self._by_hand[names]

    def _broadcast_buffers(self) -> None:
        """Make the buffers that `train_batch` changed after its last step those of rank 0, as the strategy does after each.

        Whether it changed any cannot be known: batch norm writes its running statistics, and ``.data`` anything, without a new
        ``_version``.
        """
        with self._state.bus.accumulate(self._state.prepared, True):
            pass

    def _complete(self, state: State) -> bool:
        assert self._open_by_hand is not None
        return self._open_by_hand.complete()

    def _check_open(self) -> None:
        if not self._open:
            raise WrongState("step(…) is called in train_batch, while that runs.")
        if self._open_by_hand is not None:
            raise WrongState(
                "step(…) or step.manual(…) is called in the block of another step.manual(…). End that block first: what "
                "follows it is not indented."
            )

    def _check_call(self, loss_function: object, batch: Batch, optimizers: Sequence[object]) -> None:
        self._check_open()
        super()._check_call(loss_function, batch, optimizers)
        if self._by_hand and tuple(optimizers) in self.waiting:
            raise WrongState(
                f"step(…, {', '.join(map(repr, optimizers))}) is called while gradients by hand of the same optimizers wait "
                "for by_hand.step(). Step by hand first."
            )
        self._note_call()

    def _note_call(self) -> None:
        if not self._called and any(parameter.grad is not None for parameter in self._state.parameters):
            raise WrongState(
                "train_batch computed gradients before its first step(…), which sets gradients to zero, so they would be lost. "
                "Compute that loss in a loss function instead of calling backward(), or: with step.manual(…) as by_hand: "
                "by_hand.backward(loss)."
            )
        self._called = True

    def _samples(self, batch: Batch) -> int:
        if not self._counts:
            return 0
        return self._state.step.samples if batch is self._whole else super()._samples(batch)

    def _log(self, step: UserStep) -> None:
        prefix = f"train/{step.name}" if step.name and len(self._state.optimizers) > 1 else "train"
        assert step.loss is not None
        parts = {f"{prefix}/{name}": value for name, value in step.losses.items()}
        scalars.log_losses(self._state, {f"{prefix}/loss": step.loss, **parts})

    _around = _outside
