"""The Trainer's settings: how each argument is checked and converted, and which have to be equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from torch import nn

from hocket.basics.losses import Reduction
from hocket.basics.plain_data import json_like
from hocket.basics.run_folder import check_name
from hocket.basics.seeding import check_seed
from hocket.basics.time import Interval, Time, TimeError, Unit, batches, interval_of, share, time_of
from hocket.data.stateful import one_sided
from hocket.errors import WrongType, WrongValue
from hocket.help import optional_packages
from hocket.hookspecs import StrategyLike
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.needs import Need
from hocket.loop.fit_duration import check_minimum, durations
from hocket.loop.nonfinite import Policy
from hocket.state import conversions

if TYPE_CHECKING:
    from hocket.basics.types import BatchTransformLike, Metric, OptimizerLike, PartLike, PluginLike, ScheduleLike
    from hocket.checkpoints import Checkpoints
    from hocket.loop.evaluate import EvalData
    from hocket_data.data_module import DataModule

T = TypeVar("T")
#: Metrics by name, or a function that makes them.
Metrics = Mapping[str, "Metric"] | Callable[[], Any] | None
Clipping = tuple[Literal["norm", "value", "adaptive"], float]


def _unchanged(given: Any) -> Any:
    return given


class Argument(Generic[T]):
    """A field of `Settings` for an argument of the Trainer: it is assigned the argument as given, and holds it converted.

    Args:
        convert: returns the value that a run uses. Raises TypeError and ValueError that say what to write.
        ranks: what is compared over ranks: the argument as recorded; whether it was given; or nothing, because it may differ,
            or because plug-ins are compared after construction.
        recorded: whether hyperparameters and checkpoints record the argument as given, or converted.
        part: whether it is data or plug-ins and no hyperparameter; plug-ins are listed with their configurations instead.
    """

    def __init__(
        self,
        convert: Callable[[Any], T] = _unchanged,
        *,
        ranks: Literal["equal", "given", "any"] = "equal",
        recorded: Literal["given", "converted"] = "given",
        part: bool = False,
    ) -> None:
        self.convert, self.ranks, self.part = convert, ranks, part
        self._record_converted = recorded == "converted"

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, settings: object, given: object) -> None:
        values = vars(settings)
        values[self._name] = value = self.convert(given)
        values.setdefault("_recorded", {})[self._name] = value if self._record_converted else given

    def __get__(self, settings: object | None, owner: type) -> T:
        if settings is None:
            raise AttributeError(self._name)  # the field has no default
        value: T = vars(settings)[self._name]
        return value


def _or_none(convert: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda given: None if given is None else convert(given)


def _first_duration(given: str | Time | Sequence[str | Time] | None) -> Time | None:
    return None if given is None else durations(given)[0]


def _fast_dev_run(given: int | None) -> int | None:
    return None if given is None or given is False else batches(given, "fast_dev_run")


def microbatch(given: object) -> int | Literal["auto"] | None:
    """Return a valid number of samples, "auto" or None. Raises ValueError."""
    if given is None:
        return None
    if given == "auto":
        return "auto"
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise WrongValue(f"«microbatch={given!r}» is not a number of samples; give a positive int, 'auto' or «None».")
    return given


def _sanity_eval(given: int) -> int:
    try:
        return batches(given, "sanity_eval") if given else 0
    except ValueError as error:
        raise WrongValue(f"{error} To evaluate nothing before training, give 0.") from None


def _accumulate(given: object) -> int | None:
    if given is None:
        return None
    try:
        time = Time.parse(given) if isinstance(given, str | Time) else None
    except TimeError:
        time = None
    if time is None or time.unit is not Unit.BATCH or not time.value:
        raise WrongValue(
            f"«accumulate={given!r}» is not a number of batches of the data. Write «accumulate='4ba'» to train on four of them "
            "in each step, or «None»."
        )
    return int(time.value) if time.value > 1 else None


def clipping(argument: str, given: object) -> Clipping | None:
    """Return the kind and threshold of gradient clipping, or None. Raises ValueError, naming the argument."""
    if given is None:
        return None
    kind: Any
    threshold: Any
    kind, threshold = given if isinstance(given, tuple | list) and len(given) == 2 else ("norm", given)
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if kind not in ("norm", "value", "adaptive") or not number or not threshold > 0:
        raise WrongValue(
            f"«{argument}={given!r}» is neither a positive norm, such as 1.0, nor a kind and a threshold: «('norm', 1.0)», "
            f"«('value', 0.5)» or «('adaptive', 0.01)». For no clipping write «{argument}=None»."
        )
    return kind, float(threshold)


def reduction(given: object) -> Reduction | None:
    """Return a valid reduction of a loss, or None. Raises ValueError."""
    if given is not None and given not in get_args(Reduction):
        raise WrongValue(
            f"«loss_reduction={given!r}» is neither 'mean' nor 'sum', 'batch' (over the whole batch, as a contrastive loss) or "
            "'gathered' (the same, gathered over ranks by the loss). Give one of them, or «None» to use the reduction of the "
            "loss function."
        )
    return given  # type: ignore[return-value]  # just checked


def policy(given: object) -> Policy:
    """Return a valid policy for non-finite values. Raises ValueError."""
    if given not in get_args(Policy):
        raise WrongValue(f"«nonfinite={given!r}» is not a policy; use 'raise', 'skip' or 'warn'.")
    return given  # type: ignore[return-value]  # just checked


def _plugins(argument: str) -> Callable[[object], Sequence[PluginLike]]:
    """Return the conversion of an argument that takes several plug-ins to a list.

    One plug-in, as a name, an instance or a class, becomes a list of one; None and False become an empty list. A mapping of
    names to arguments becomes a list of such mappings with one name each.
    """

    def convert(given: object) -> Sequence[PluginLike]:
        if given is None or given is False:
            return []
        if isinstance(given, Mapping):
            return [{name: config} for name, config in given.items()]
        if isinstance(given, bool | int | float):
            from hocket.plugins import registry  # only needed for error messages

            example = next(iter(registry.names(argument)), "name")
            raise WrongType(
                f"{argument}={given!r} should be a list of names, {{'name': {{…}}}} and instances, such as "
                f"{argument}=[{example!r}]."
            )
        return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]

    return convert


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a `hocket.Trainer` except the model, each checked when it is assigned, before anything is built."""

    train_data: Argument[Iterable[Any] | None] = Argument(ranks="given", part=True)
    loss: Argument[Callable[..., Any] | None] = Argument(conversions.loss, ranks="given", recorded="converted")
    loss_reduction: Argument[Reduction | None] = Argument(reduction)
    inputs: Argument[PartLike | None] = Argument()
    targets: Argument[PartLike | None] = Argument()
    outputs: Argument[PartLike | None] = Argument()
    batch_transform: Argument[BatchTransformLike | None] = Argument(ranks="given")
    global_batch: Argument[int | None] = Argument()
    eval_data: Argument[EvalData | None] = Argument(ranks="given", part=True)
    data: Argument[DataModule | None] = Argument(ranks="given", part=True)
    metrics: Argument[Metrics] = Argument(conversions.metrics, ranks="given", recorded="converted")
    train_metrics: Argument[Metrics] = Argument(
        partial(conversions.metrics, argument="train_metrics"), ranks="given", recorded="converted"
    )
    optimizer: Argument[OptimizerLike | None] = Argument(ranks="given")
    schedule: Argument[ScheduleLike | None] = Argument()
    schedule_every: Argument[str | Time | None] = Argument()
    #: The planned length of training, to which schedules refer; `limits` has the other lengths.
    duration: Argument[Time | None] = Argument(_first_duration)
    #: Requests to stop take effect after this long.
    min_duration: Argument[Time | None] = Argument(_or_none(partial(time_of, argument="min_duration")))
    algorithms: Argument[Sequence[PluginLike]] = Argument(_plugins("algorithms"), ranks="any", part=True)
    callbacks: Argument[Sequence[PluginLike]] = Argument(_plugins("callbacks"), ranks="any", part=True)
    loggers: Argument[Sequence[PluginLike]] = Argument(_plugins("loggers"), ranks="any", part=True)
    strategy: Argument[PluginLike] = Argument(ranks="any", part=True)
    precision: Argument[PluginLike] = Argument(conversions.precision, ranks="any", part=True)
    device: Argument[PluginLike] = Argument(conversions.device, ranks="any", recorded="converted")
    devices: Argument[int | None] = Argument(ranks="any")
    actions: Argument[PluginLike] = Argument(ranks="any", part=True)
    microbatch: Argument[int | Literal["auto"] | None] = Argument(microbatch, ranks="any")
    #: Number of the data's batches that make one batch of training; None for one.
    accumulate: Argument[int | None] = Argument(_accumulate)
    eval_every: Argument[Interval] = Argument(partial(interval_of, argument="eval_every"))
    log_every: Argument[Interval] = Argument(partial(interval_of, argument="log_every", optional=False))
    clip_gradients: Argument[Clipping | None] = Argument(partial(clipping, "clip_gradients"))
    nonfinite: Argument[Policy] = Argument(policy)
    seed: Argument[int | None] = Argument(check_seed)
    deterministic: Argument[bool] = Argument(conversions.switch("deterministic"), recorded="converted")
    #: The arguments of `torch.compile`; None to compile nothing.
    compile: Argument[Mapping[str, Any] | None] = Argument(conversions.compiled)
    checkpoints: Argument[Checkpoints | None] = Argument(conversions.checkpoints, ranks="given", recorded="converted")
    resume: Argument[str | Path | None] = Argument(conversions.resume, ranks="given", recorded="converted")
    run_name: Argument[str | None] = Argument(check_name)
    folder: Argument[Path] = Argument(conversions.folder, ranks="any")
    plugins: Argument[bool | Sequence[str] | None] = Argument(ranks="any")
    profile_plugins: Argument[bool] = Argument(conversions.switch("profile_plugins"), ranks="any", recorded="converted")
    profile: Argument[Sequence[PluginLike]] = Argument(conversions.profile, ranks="any", part=True)
    limit_train: Argument[float | None] = Argument(_or_none(partial(share, argument="limit_train")))
    limit_eval: Argument[float | None] = Argument(_or_none(partial(share, argument="limit_eval")))
    limit_predict: Argument[float | None] = Argument(_or_none(partial(share, argument="limit_predict")))
    fast_dev_run: Argument[int | None] = Argument(_fast_dev_run)
    overfit: Argument[int | None] = Argument(_or_none(partial(batches, argument="overfit")))
    detect_anomaly: Argument[bool] = Argument(conversions.switch("detect_anomaly"), ranks="any", recorded="converted")
    sanity_eval: Argument[int] = Argument(_sanity_eval)
    summary: Argument[bool] = Argument(conversions.switch("summary"), recorded="converted")
    _recorded: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_minimum(self.min_duration, self.duration)
        if self.data is not None:
            optional_packages.module("hocket_data.data_module_loading", "data=").check(
                self.data, self.train_data, self.eval_data
            )
        values = vars(self)
        if (number := self.fast_dev_run) is not None:  # so many batches of everything
            values.update(limit_train=number, limit_eval=number, limit_predict=number)
            values.update(duration=Time.parse("1ep"), min_duration=None)
        if not self.lasting:
            values.update(checkpoints=None, resume=None)
        if self.checkpoints is not None and (problem := one_sided(self.data)):
            raise WrongType(problem)

    @classmethod
    def arguments(cls) -> Mapping[str, Argument[Any]]:
        """Return the fields by name."""
        return {name: argument for name, argument in vars(cls).items() if isinstance(argument, Argument)}

    @property
    def given(self) -> Mapping[str, Any]:
        """All arguments except the model, as they are recorded."""
        return MappingProxyType(self._recorded)

    @property
    def fast(self) -> bool:
        """Whether ``fast_dev_run`` was given; limits and duration are then that many batches."""
        return self.fast_dev_run is not None

    @property
    def limits(self) -> Sequence[Time]:
        """The lengths of training after the first of ``duration``, at which it ends if they are over earlier."""
        given = self.given["duration"]
        return [] if self.fast or given is None else durations(given)[1:]

    @property
    def lasting(self) -> bool:
        """Whether the run writes files; ``fast_dev_run`` and ``overfit`` do not."""
        return not self.fast and self.overfit is None

    def samples_per_microbatch(self, strategy: StrategyLike) -> int | None:
        """Return the initial microbatch size; None for the full batch. Raises ValueError if the strategy rules out "auto"."""
        if self.microbatch == "auto" and Need.FULL_PARAMETERS not in strategy.offers:
            raise WrongValue(
                f"«microbatch='auto'» lets each rank search its largest size alone, which {type(strategy).__name__} does not "
                "allow: a forward pass needs the other ranks, which would wait for a rank that runs out of memory. Give a "
                "number, such as «microbatch=8»."
            )
        if self.accumulate is not None and not strategy.microbatch_events:
            raise WrongValue(
                f"«accumulate=» makes batches of the data microbatches of one step, but {type(strategy).__name__} computes the "
                "gradients of a batch itself. Omit «accumulate=» and give the data larger batches."
            )
        return None if self.microbatch == "auto" else self.microbatch

    # --- views for the plan, loggers and the comparison of ranks

    def facts(self, model: nn.Module, reasons: Mapping[str, str]) -> dict[str, str]:
        """Return the first lines of the plan by topic; ``reasons`` are those for the choices of "auto"."""
        parameters = sum(parameter.numel() for parameter in model.parameters())
        described = f"{type(model).__name__}, {parameters:,} parameters"
        length = " or ".join(map(str, [self.duration or "given to fit", *self.limits]))
        least = "" if self.min_duration is None else f", at least {self.min_duration}"
        facts = {"model": described, "duration": length + (", whichever is over first" if self.limits else "") + least}
        if self.accumulate is not None:
            facts["accumulate"] = f"{self.accumulate} batches of the data are one batch (ba): one step"
        return {**facts, **reasons}

    def hyperparameters(self, attachments: Sequence[Attachment]) -> dict[str, Any]:
        """Return arguments and attached plug-ins as JSON-like values, without secrets; other objects as their class names."""
        from hocket.basics.masking import masked

        attached: dict[str, Any] = {}
        for attachment in attachments:
            attached.setdefault(attachment.kind, {})[attachment.name] = json_like(attachment.config)
        shown = {name: self.given[name] for name, argument in self.arguments().items() if not argument.part}
        return {name: masked(json_like(value), name) for name, value in shown.items()} | attached

    def of_all_ranks(self) -> dict[str, Any]:
        """Return the arguments that have to be equal on all ranks."""
        return {name: self.given[name] for name, argument in self.arguments().items() if argument.ranks == "equal"}

    def given_on_all_ranks(self) -> dict[str, bool]:
        """Return whether each argument was given that either all ranks or no rank must be given, with any value."""
        names = [name for name, argument in self.arguments().items() if argument.ranks == "given"]
        return {name: self.given[name] is not None for name in names}
