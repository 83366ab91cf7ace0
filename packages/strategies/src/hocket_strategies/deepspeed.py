"""DeepSpeed: its engine computes gradients, clips and steps; ZeRO partitions state over the ranks."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket import Device, Need, Phase, Precision, State, hookimpl
from hocket.errors import WrongValue
from hocket.hookspecs import PrecisionLike
from hocket.loop.accumulation import count_window
from hocket.loop.actions import accumulate_gradients, finish_gradients
from hocket.plugins import PluginError
from hocket_strategies import zero_config, zero_state
from hocket_strategies.rank_strategy import RankStrategy


class DeepSpeed(RankStrategy):
    """Train with DeepSpeed's engine and ZeRO: optimizer state, gradients and weights are partitioned over the ranks.

    Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054. Stage 0 is data parallelism, stage 1 partitions the optimizer
    state, stage 2 also gradients, stage 3 also weights. Start scripts with ``torchrun`` or with DeepSpeed's launcher.
    The Trainer's ``global_batch``, ``microbatch`` and ``clip_gradients`` apply, as with every strategy; the engine does
    the clipping (from stage 1 on by norm only) and the accumulation. Needs the extra ``deepspeed`` and, to
    build its extensions once, a C++ compiler and ninja.

    From stage 1 on no rank has full gradients, and the model's weights are copies of the engine's. So algorithms that act
    on gradients, the optimizer or the weights are refused, and non-finite gradients are noticed only by the loss of the
    next batch.

    Args:
        stage: ZeRO stage, 0 to 3; None for the configuration's, or 2.
        offload: keep the optimizer state (and at stage 3 weights) in CPU memory.
        config: further sections of DeepSpeed's configuration, or the path of its JSON file. ``gradient_clipping``,
            ``gradient_accumulation_steps`` (number of microbatches per rank) and ``train_micro_batch_size_per_gpu`` (size
            of a microbatch) replace the Trainer's arguments.
        split_data, uneven: as for :class:`~hocket_strategies.ddp.DDP`.

    Raises:
        ValueError: the arguments contradict each other, or a section of the configuration belongs elsewhere.
        hocket.plugins.PluginError: the package is not installed, or a plug-in cannot run under ZeRO.

    Example:
        >>> import hocket, hocket_strategies, torch
        >>> strategy = hocket_strategies.DeepSpeed(stage=2, offload=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> trainer = hocket.Trainer(model=model, strategy=strategy, devices=2)  # doctest: +SKIP
    """

    def __init__(
        self,
        stage: int | None = None,
        *,
        offload: bool = False,
        config: Mapping[str, Any] | str | Path | None = None,
        split_data: bool = True,
        uneven: str = "pad",
    ) -> None:
        super().__init__(split_data=split_data, uneven=uneven)
        self._config = zero_config.read(config)
        zero = self._config.setdefault("zero_optimization", {})
        given = zero.setdefault("stage", 2 if stage is None else stage)
        if given not in (0, 1, 2, 3) or stage not in (None, given) or (offload and not given):
            raise WrongValue(
                f"deepspeed was given «stage={stage}», «offload={offload}» and a configuration with stage {given}. Give one "
                "stage of 0, 1, 2, 3; «offload=True» needs at least 1."
            )
        self.stage: int = given
        #: Stage 0 keeps full weights and gradients on every rank.
        self.offers = Need(0) if self.stage else type(self).offers & ~Need.SEVERAL_STEPS  # type: ignore[misc]  # by instance
        self._offload = offload
        #: Number and size of microbatches, as configured.
        self._microbatches = int(self._config.pop("gradient_accumulation_steps", 1))
        self._microbatch_size = self._config.pop("train_micro_batch_size_per_gpu", None)
        self._engine: Any = None
        self._prepared: _Prepared | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        #: The parameters of each optimizer group, before the engine replaced them.
        self._groups: list[list[nn.Parameter]] = []
        self._dtype: torch.dtype | None = None
        #: What the step multiplies gradients by, if losses brought weights.
        self._factor: Tensor | None = None

    # --- processes

    def setup_environment(self, device: Device) -> torch.device:
        """Join the other ranks; import DeepSpeed. Raises PluginError if it is not installed."""
        on = super().setup_environment(device)
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))  # the engine requires it
        if "deepspeed" not in sys.modules:
            os.environ.setdefault("DS_ACCELERATOR", on.type)
        deepspeed = zero_config.import_deepspeed()
        found = deepspeed.accelerator.get_accelerator().device_name()
        if found != on.type:
            raise WrongValue(
                f"DeepSpeed computes on {found} in this process, but the Trainer on {on.type}. Pass «device='{found}'», or set "
                f"the environment variable DS_ACCELERATOR={on.type} before DeepSpeed is imported."
            )
        return on

    def shutdown(self) -> None:
        """See :meth:`RankStrategy.shutdown`."""
        super().shutdown()
        if self._engine is not None and not dist.is_initialized():
            zero_state.forget_groups()

    # --- checks

    def init(self, state: State) -> None:
        """Adopt the Trainer's clipping and precision; refuse plug-ins and settings that the engine would silently ignore."""
        if self.stage:
            for attachment in state.bus.attachments:
                if attachment.kind == "algorithms" and attachment.obj.phase >= Phase.GRADIENT:
                    raise PluginError(
                        f"Algorithm '{attachment.name}' acts on {attachment.obj.phase.name.lower()}, which ZeRO stage "
                        f"{self.stage} "
                        "keeps in its own partitions. Remove it, or write «strategy={'deepspeed': {'stage': 0}}»."
                    )
        self._take_clipping(state)
        self._take_precision(state.precision)
        if self._microbatch_size is not None:
            if state.microbatch not in (None, self._microbatch_size):
                raise WrongValue(
                    f"«microbatch={state.microbatch}» contradicts «train_micro_batch_size_per_gpu={self._microbatch_size}» in "
                    "DeepSpeed's configuration. Give one of them."
                )
            state.microbatch = self._microbatch_size
        elif self._microbatches > 1 and state.microbatch is not None:
            raise WrongValue(
                f"«microbatch={state.microbatch}» contradicts «gradient_accumulation_steps={self._microbatches}» in "
                "DeepSpeed's configuration. Give one of them."
            )

    def _take_clipping(self, state: State) -> None:
        if state.clipping is None or not self.stage:
            return
        kind, threshold = state.clipping
        own = self._config.get("gradient_clipping", threshold)
        if kind != "norm" or own != threshold:
            raise WrongValue(
                f"«clip_gradients={state.clipping}» cannot be done by ZeRO stage {self.stage} with «gradient_clipping={own}» "
                "in its configuration: it clips by norm, once. Give «clip_gradients=1.0», or only one of the two."
            )
        self._config["gradient_clipping"] = threshold

    def _take_precision(self, precision: PrecisionLike) -> None:
        low = [name for name in ("bf16", "fp16") if self._config.get(name, {}).get("enabled")]
        if getattr(type(precision), "step_optimizer", None) is not Precision.step_optimizer or (
            low and precision.compute_dtype is not torch.float32
        ):
            raise PluginError(
                f"Precision {type(precision).__name__} and DeepSpeed would both convert or scale. Omit «precision=» and "
                "configure DeepSpeed, as in «strategy={'deepspeed': {'config': {'bf16': {'enabled': True}}}}», or use 'fp32' "
                "or 'bf16'."
            )
        if low and not self.stage:
            raise WrongValue(
                f"DeepSpeed's configuration enables {low[0]} at stage 0, where its engine keeps gradients and 32-bit weights "
                "that clipping, weights of losses and checkpoints do not reach. Write "
                "«strategy={'deepspeed': {'stage': 1, …}}», or «precision='bf16'» without that section."
            )
        if low:
            self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[low[0]]
        elif precision.compute_dtype is torch.bfloat16:
            # The engine disables autocast unless its configuration enables it.
            self._config.setdefault("torch_autocast", {"enabled": True, "dtype": "torch.bfloat16"})

    # --- the model and its optimizer

    def prepare_model(self, module: nn.Module) -> nn.Module:
        """Return the module; the engine wraps it once there is an optimizer. Raises ValueError for 64-bit weights."""
        wide = next((name for name, p in module.named_parameters() if p.dtype is torch.float64), None)
        if wide and self.stage:
            raise WrongValue(
                f"{wide} is float64, but ZeRO keeps weights in 32 bits. Use «precision='fp32'», or «strategy='ddp'»."
            )
        self._prepared = _Prepared(module)
        return self._prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make the engine. Schedules still set the learning rate of this optimizer.

        Raises ValueError for a second optimizer, and for one that recomputes gradients.
        """
        if self._engine is not None or isinstance(optimizer, torch.optim.LBFGS):
            raise WrongValue(
                "DeepSpeed's engine steps one optimizer, once per computation of gradients. Give one such as "
                "torch.optim.AdamW with parameter groups, or use «strategy='ddp'»."
            )
        assert self._prepared is not None
        self._optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._engine = zero_config.import_deepspeed().initialize(
            model=self._prepared.module, optimizer=optimizer, config=self._engine_config(), dist_init_required=False
        )[0]
        self._prepared.__dict__["engine"] = self._engine  # not a submodule
        return optimizer

    def _engine_config(self) -> dict[str, Any]:
        config = copy.deepcopy(self._config)
        if self._offload:
            where = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
            config["zero_optimization"].setdefault("offload_optimizer", where)
            if self.stage == 3:
                config["zero_optimization"].setdefault("offload_param", where)
            config.setdefault("zero_force_ds_cpu_optimizer", False)
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("gradient_clipping", 0.0)  # recent versions clip by default
        config.setdefault("steps_per_print", sys.maxsize)
        # The loop decides which microbatch is the last of its batch, and how losses are weighted.
        return {**config, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}

    # --- the step

    @property
    def _equal_microbatches(self) -> bool:
        return self.stage > 1

    @hookimpl(wrapper=True)
    def convert_batch(self, batch: Any):  # type: ignore[no-untyped-def]  # a generator of one value
        """Convert inputs to the dtype of the weights, where the engine has made those 16-bit."""
        converted = yield
        return converted if self._dtype is None else Precision.convert_batch(_InputsOf(self._dtype), converted)

    def accumulate(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Tell the engine whether this is the last microbatch."""
        if self._engine is not None:
            self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def gradients(self, state: State) -> bool | None:
        """From stage 1 on, accumulate them in the engine, which rescales, clips and drops them in its step."""
        if self._microbatches > 1 and self._microbatch_size is None:
            state.microbatch = -(-count_window(state, state.batch).samples // self._microbatches)
        if not self.stage:
            return None  # they are in `.grad`
        zero_state.forget_gradients(self._engine)  # of a skipped batch
        self._factor = accumulate_gradients(state)
        finish_gradients(state, clip=False)
        return True

    def backward(self, state: State, loss: Tensor) -> bool:
        """Call the engine's backward."""
        self._engine.backward(state.bus.scale_loss(loss))
        return True

    def optimizer_step(self, state: State, closure: Callable[[], Tensor]) -> bool:
        """Step the engine; return False if 16-bit gradients overflowed. Sets ``state.gradient_norm``."""
        zero_state.step(self._engine, self._factor)
        if self.stage:
            norm = self._engine.get_global_grad_norm()
            state.gradient_norm = norm if norm is None else torch.as_tensor(norm, device=state.device)
        return bool(self._engine.was_step_applied())

    # --- full state

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the full weights on every rank; in 32 bits where the engine trains 16-bit copies."""
        return zero_state.full_weights(_inside(module))

    def load_model_state(self, module: nn.Module, state_dict: dict[str, Any]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_model_state`."""
        zero_state.load_full_weights(_inside(module), state_dict, self._engine if self.stage else None)
        return True

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the full state on every rank, in the format of torch's optimizers."""
        if not self.stage:
            return super().optimizer_state(module, optimizer)
        return zero_state.full_optimizer_state(optimizer, self._groups)

    def load_optimizer_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_optimizer_state`."""
        if not self.stage:
            return super().load_optimizer_state(module, optimizer, state_dict)
        zero_state.load_full_optimizer_state(optimizer, self._groups, state_dict, self._engine)
        return True


class _Prepared(nn.Module):
    """Call the engine once it exists, and the module before."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.__dict__["engine"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.__dict__["engine"]
        return (self.module if engine is None else engine)(*args, **kwargs)


class _InputsOf(Precision):
    def __init__(self, dtype: torch.dtype) -> None:
        self.input_dtype = dtype


def _inside(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _Prepared) else module
