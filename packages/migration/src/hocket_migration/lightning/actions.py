"""How a LightningModule's own methods act in hocket's steps: the actions that it overrides, and manual optimization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket import hookimpl
from hocket.basics.plugin_errors import PlanError
from hocket.data.batches import Window
from hocket.errors import WrongState, WrongType
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.needs import Need
from hocket.hookspecs.strategies import replicas
from hocket.loop.actions import clip_and_note, finish_gradients
from hocket_migration.lightning.installed_lightning import overrides

if TYPE_CHECKING:
    from hocket.state.state import State
    from hocket_migration.lightning.task import LightningTask


class NoLoss(Exception):
    """``training_step`` returned None: this batch has no gradients."""


class _Implemented:
    """The actions that a module needs, by name; attached like a plug-in."""

    def __init__(self, methods: dict[str, Callable[..., Any]]) -> None:
        vars(self).update(methods)


class Actions:
    """The steps of one module. `attach` adds to a run's plug-ins what the module's methods need, and no more."""

    def __init__(self, task: LightningTask) -> None:
        self._task = task
        self._trainer = task.trainer
        self._hooks = task.trainer.hooks
        self._module = task.model
        self._attachment: Attachment | None = None
        self._without_steps: Attachment | None = None
        self._gradients: Callable[[State], Any] | None = None
        self._optimizer_step: Callable[..., Any] | None = None
        base = self._trainer.framework.LightningModule
        self._custom = {name for name in _OVERRIDABLE if overrides(self._module, name, base)}
        #: Whether the module's own ``optimizer_step`` steps, before which gradients are clipped.
        self.steps_itself = bool(self._module.automatic_optimization) and "optimizer_step" in self._custom
        #: Whether a step is being taken, where gradients are those of the batch again; and whether it is about to be.
        self._stepping = self._finishing = False
        self._taken = False
        #: How often each optimizer has stepped in the current batch of manual optimization, by id.
        self._steps: Counter[int] = Counter()

    def attach(self, state: State) -> None:
        """Attach the actions."""
        custom = self._custom
        methods: dict[str, Callable[..., Any]] = {}
        if not self._module.automatic_optimization:
            methods = {"gradients": self._manual_gradients, "optimizer_step": self._was_taken}
        else:
            methods = {"optimizer_step": self._counted}
            if self.steps_itself:
                methods = {"gradients": self._own_step, "optimizer_step": self._was_taken}
            else:
                methods["gradients"] = self._without_loss
            if "backward" in custom:
                methods["backward"] = self._backward
            if "optimizer_zero_grad" in custom:
                methods["zero_grad"] = self._zero_grad
            if self.steps_itself or "configure_gradient_clipping" in custom:
                methods["clip_gradients"] = self._clip
        name = f"{type(self._module).__name__}'s steps"
        self._attachment = Attachment("task", name, _Implemented(methods))
        state.bus.attach(self._attachment)
        if self._trainer._of_kind("StochasticWeightAveraging"):
            without = _Implemented({"gradients": self._statistics, "optimizer_step": self._not_taken})
            self._without_steps = Attachment("task", f"{name} for statistics", without)
            state.bus.attach(self._without_steps)

    def begin(self, state: State) -> None:
        """Prepare for a fit. Raises PlanError if the strategy cannot train such a module."""
        assert self._attachment is not None
        mine = (self._attachment, *([] if self._without_steps is None else [self._without_steps]))
        self._gradients = state.bus.compiled("gradients", mine)
        self._optimizer_step = state.bus.compiled("optimizer_step", mine)
        strategy = state.strategy
        if self._module.automatic_optimization:
            self._trainer.strategy._step = self._step
        else:
            if Need.FULL_PARAMETERS not in strategy.offers or replicas(strategy) > 1:
                raise PlanError(
                    f"{type(self._module).__name__} has manual optimization, which needs full parameters on every rank, and "
                    f"strategy {type(strategy).__name__} shards them. Use strategy='ddp', or automatic optimization."
                )
            if state.microbatch is not None or self._trainer.accumulate_grad_batches != 1:
                raise PlanError(self._divides())
            if state.clipping is not None:
                raise PlanError(
                    f"{type(self._module).__name__} has manual optimization, where gradients are clipped by hand. Call "
                    "self.clip_gradients(optimizer, gradient_clip_val=…) before its step, and omit gradient_clip_val= or "
                    "clip_gradients= of the Trainer."
                )
            self._trainer.strategy._step = self._manual_step
            self._trainer.strategy._backward = self._manual_backward

    def _divides(self) -> str:
        return (
            f"{type(self._module).__name__} has manual optimization, which computes on the batch as a whole, so microbatch=, "
            "accumulate= and accumulate_grad_batches= cannot divide it. Omit them, and step in every second training_step, "
            "say; or use automatic optimization."
        )

    # --- automatic optimization

    @hookimpl(wrapper=True)
    def _counted(self, state: State, closure: Any) -> Any:
        with self._task.repeating():
            taken = yield
        self._count(1 if taken else 0)
        return taken

    def _count(self, steps: int) -> None:
        self._trainer.global_step += steps

    @hookimpl(wrapper=True)
    def _without_loss(self, state: State) -> Any:
        """Let a batch without a loss have no gradients, so that the step changes nothing."""
        batch = state.batch
        try:
            result = yield
        except NoLoss:
            state.batch = batch
            self._empty(state)
            return True
        return result

    def _empty(self, state: State) -> None:
        if state.strategy.world_size > 1:
            raise WrongState(
                f"training_step of {type(self._module).__name__} returned None, with several ranks. All of them have to "
                "compute gradients in every batch: return a loss, such as one multiplied by 0."
            )
        state.bus.zero_grad(state)
        if state.loss is None:
            state.loss = torch.zeros((), device=state.device)
        state.loss = state.loss.detach()
        state.gradient_norm = None
        self._task.zero_gradients()
        if not self.steps_itself:
            self._hooks.both("on_before_optimizer_step", self._trainer.optimizers[0])

    def _backward(self, state: State, loss: Tensor) -> bool:
        self._hooks.module("backward", state.bus.scale_loss(loss))
        return True

    def _zero_grad(self, state: State) -> bool:
        """Leave gradients to ``optimizer_zero_grad``, which is called once the loss is computed."""
        return True

    def _clip(self, state: State) -> bool | None:
        trainer = self._trainer
        if self.steps_itself and not self._finishing:
            return True
        if "configure_gradient_clipping" not in self._custom:
            return None
        self._hooks.module(
            "configure_gradient_clipping",
            trainer.optimizers[0],
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
        return True

    # --- a module with an optimizer_step of its own

    def _own_step(self, state: State) -> bool:
        """Call the module's ``optimizer_step``, whose closure computes the gradients."""
        assert self._gradients is not None
        if self._statistics(state):
            return True
        if self._stepping:  # an optimizer asks for the gradients again
            self._gradients(state)
            self._finish(state)
            return True
        batch, computed = state.batch, False

        def closure() -> Tensor | None:
            nonlocal computed
            state.batch = batch
            try:
                if computed:
                    return self._again(state)
                computed = True
                with torch.enable_grad():
                    self._gradients(state)  # type: ignore[misc]
            except NoLoss:
                state.batch = batch
                self._empty(state)
                return None
            return state.loss

        self._taken = False
        trainer = self._trainer
        self._hooks.module(
            "optimizer_step",
            trainer.current_epoch,
            trainer.batch_idx + trainer.batches_loaded,  # the last batch of a window, in which Lightning steps
            trainer.strategy._lightning_optimizers[0],
            closure,
        )
        self._count(1)  # whether or not it has stepped, as Lightning counts
        if state.loss is None:
            state.loss = torch.zeros((), device=state.device)
        state.loss = state.loss.detach()
        return True

    def _finish(self, state: State) -> None:
        """Call ``on_before_optimizer_step`` and clip, once the closure of a step has returned."""
        self._hooks.both("on_before_optimizer_step", self._trainer.optimizers[0])
        self._finishing = True
        try:
            clip_and_note(state)
        finally:
            self._finishing = False

    def _again(self, state: State) -> Tensor:
        assert self._gradients is not None
        with state.unlogged(), torch.enable_grad():
            self._gradients(state)
        self._finish(state)
        assert state.loss is not None
        return state.loss

    def _step(self, optimizer: Any, closure: Callable[[], Any], **keywords: Any) -> Any:
        """Step for ``optimizer.step(closure=…)`` in the module's ``optimizer_step``."""
        state = self._trainer.run_state
        assert state is not None and self._optimizer_step is not None
        _check_keywords(keywords)
        result = closure()
        self._finish(state)
        self._stepping = True
        try:
            with self._task.repeating():
                taken = bool(self._optimizer_step(state, lambda: self._again(state)))
        finally:
            self._stepping = False
        self._taken |= taken
        return result

    # --- an epoch without steps, for the statistics of averaged weights

    def _statistics(self, state: State) -> bool | None:
        """Compute batches without gradients, if this is such an epoch."""
        if not self._trainer.skips_backward:
            return None
        bus, task, window = state.bus, self._task, state.batch
        bus.before_train_batch(state)
        for batch in window.batches if isinstance(window, Window) else [window]:
            state.batch = batch
            bus.before_forward(state)
            with bus.forward_context():
                task.training_step(bus.move_batch(state, state.batch))
        state.batch, self._taken, state.gradient_norm = window, False, None
        loss = task.loss_of_output()
        state.loss = torch.zeros((), device=state.device) if loss is None else self._over_ranks(state, loss.detach())
        if not self._trainer.skips_step:  # a step without gradients, which changes nothing and is counted
            state.bus.zero_grad(state)
            self._hooks.both("on_before_optimizer_step", self._trainer.optimizers[0])
            self._count(1)
        return True

    def _not_taken(self, state: State, closure: Any) -> bool | None:
        return False if self._trainer.skips_backward else None

    def _was_taken(self, state: State, closure: Any) -> bool:
        return self._taken

    # --- manual optimization

    def _manual_gradients(self, state: State) -> bool:
        """Call ``training_step``, which computes gradients and steps by itself."""
        bus, task = state.bus, self._task
        if isinstance(state.batch, Window):
            raise PlanError(self._divides())
        bus.before_train_batch(state)
        state.batch = bus.move_batch(state, state.batch)
        self._steps = state.step.taken = Counter()
        self._taken, state.gradient_norm = False, None
        state.loss = None
        with bus.forward_context(), torch.enable_grad():
            task.training_step(state.batch)
        loss = task.loss_of_output()
        if loss is not None:
            state.loss = loss
        if state.loss is None:
            state.loss = torch.zeros((), device=state.device)
        state.loss = self._over_ranks(state, state.loss.detach())
        return True

    def _over_ranks(self, state: State, loss: Tensor) -> Tensor:
        if state.strategy.world_size == 1:
            return loss
        share = state.rank_samples / state.batch_samples
        return state.bus.all_reduce(torch.where(torch.tensor(share != 0), loss, 0.0) * share, "sum")

    def _manual_backward(self, loss: Tensor, *arguments: Any, **keywords: Any) -> None:
        state = self._trainer.run_state
        assert state is not None
        bus, world = state.bus, state.strategy.world_size
        state.loss = loss
        bus.after_loss(state)
        bus.before_backward(state)
        scaled = state.loss
        if world > 1:
            scaled = scaled * (state.rank_samples * world / state.batch_samples)
        self._hooks.module("backward", bus.scale_loss(scaled), *arguments, **keywords)
        if world > 1:
            # The mean over ranks of what earlier calls averaged is the same, so all gradients are averaged together.
            with bus.accumulate(state.prepared, True):
                bus.reduce_gradients(state.prepared, [each for each in state.parameters if each.grad is not None])
        bus.after_backward(state)
        state.loss = loss.detach()

    def _manual_step(self, optimizer: Any, closure: Callable[[], Any], **keywords: Any) -> Any:
        state = self._trainer.run_state
        assert state is not None and self._optimizer_step is not None
        _check_keywords(keywords)
        bus, step = state.bus, state.step
        with torch.enable_grad():
            result = closure()
        if isinstance(result, Tensor):  # what an optimizer that calls the closure itself gets first
            state.loss = result.detach()
        step.optimizers = [optimizer]
        try:
            bus.begin_step(str(self._trainer.optimizers.index(optimizer)))
            finish_gradients(state, clip=False)

            def again() -> Any:
                with torch.enable_grad():
                    return closure()

            taken = bool(self._optimizer_step(state, again))
        finally:
            step.optimizers = None
        self._taken |= taken
        self._steps[id(optimizer)] += int(taken)
        self._count(int(taken))
        return result  # as torch's optimizers do, the loss at the weights before the step


def _check_keywords(keywords: dict[str, Any]) -> None:
    if keywords:
        raise WrongType(
            f"optimizer.step(…) was given {', '.join(keywords)}=, which hocket's steps do not pass on. Omit them."
        )


_OVERRIDABLE = ("optimizer_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping")
