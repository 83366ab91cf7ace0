"""The Trainer's settings: its checked arguments, in the form that a run uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from hocket.errors import WrongValue
from hocket.hookspecs import StrategyLike
from hocket.hookspecs.needs import Need
from hocket.losses import Reduction
from hocket.plugins.spec import Attachment
from hocket.run_folder import check_name, local
from hocket.time import Interval, Time, TimeError, Unit, batches, interval_of, share
from hocket.training.guard import Policy
from hocket.training.seeding import check_seed
from hocket.training.until import durations, minimum

if TYPE_CHECKING:
    from hocket.checkpoints import Checkpoints

#: Arguments that are not hyperparameters: data, and plug-ins, which are listed with their configurations instead.
_PARTS = {
    "train_data",
    "eval_data",
    "data",
    "algorithms",
    "callbacks",
    "loggers",
    "profile",
    "strategy",
    "precision",
    "actions",
}
#: Arguments that may differ between ranks, or are compared as plug-ins, as data or after construction …
_OF_EACH_RANK = _PARTS | {
    "device", "devices", "optimizer", "microbatch", "folder", "plugins", "profile_plugins", "detect_anomaly", "resume",
    "checkpoints", "metrics", "train_metrics", "loss", "batch_transform",
}  # fmt: skip
#: … and the subset that either all ranks or no rank must be given.
_PRESENCE = (
    "train_data", "eval_data", "data", "resume", "checkpoints", "loss", "metrics", "train_metrics", "optimizer",
    "batch_transform",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run, except model, data and plug-ins; each field corresponds to an argument of `hocket.Trainer`.

    `of` creates the settings and checks each argument, so that invalid ones fail before anything is built.
    """

    #: All arguments except the model, as given.
    given: Mapping[str, Any]
    seed: int | None
    global_batch: int | None
    #: Whether ``fast_dev_run`` was given; limits and duration are then that many batches.
    fast: bool
    #: The planned length of training, to which schedules refer; and other lengths at which it ends if they are over earlier.
    duration: Time | None
    limits: Sequence[Time]
    #: Requests to stop take effect after this long.
    min_duration: Time | None
    #: Batches, or the fraction of them.
    limit_train: int | float | None
    limit_eval: int | float | None
    limit_predict: int | float | None
    overfit: int | None
    sanity_eval: int
    eval_every: Interval
    log_every: Interval
    microbatch: int | Literal["auto"] | None
    #: Number of the data's batches that make one batch of training; None for one.
    accumulate: int | None
    #: Kind and threshold.
    clipping: tuple[Literal["norm", "value", "adaptive"], float] | None
    loss_reduction: Reduction | None
    nonfinite: Policy
    deterministic: bool
    detect_anomaly: bool
    #: The arguments of `torch.compile`; None to compile nothing.
    compile: Mapping[str, Any] | None
    #: None, like ``resume``, for runs that write no files.
    checkpoints: Checkpoints | None
    resume: str | Path | None
    run_name: str | None
    folder: Path

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Check the Trainer's arguments, by name. Raises TypeError and ValueError that say what to write."""
        limits = {name: given[name] for name in ("limit_train", "limit_eval", "limit_predict")}
        fast, overfit = given["fast_dev_run"], given["overfit"]
        fast = None if fast is False else fast
        until, *others = (None,) if given["duration"] is None else durations(given["duration"])
        least = minimum(given["min_duration"], until)
        if fast is not None:
            limits, until, others, least = dict.fromkeys(limits, fast), Time.parse("1ep"), [], None
        counts = {"fast_dev_run": fast, **limits, "overfit": overfit}
        for name, number in counts.items():
            if number is not None:
                (share if name in limits else batches)(number, name)
        lasting = fast is None and overfit is None
        return cls(
            given=MappingProxyType(dict(given)),
            seed=check_seed(given["seed"]),
            global_batch=given["global_batch"],
            fast=fast is not None,
            duration=until,
            limits=others,
            min_duration=least,
            **limits,
            overfit=overfit,
            sanity_eval=_sanity_eval(given["sanity_eval"]),
            eval_every=interval_of(given["eval_every"], "eval_every"),
            log_every=interval_of(given["log_every"], "log_every", optional=False),
            microbatch=microbatch(given["microbatch"]),
            accumulate=_accumulate(given["accumulate"]),
            clipping=clipping("clip_gradients", given["clip_gradients"]),
            loss_reduction=reduction(given["loss_reduction"]),
            nonfinite=policy(given["nonfinite"]),
            deterministic=given["deterministic"],
            detect_anomaly=given["detect_anomaly"],
            compile=({} if given["compile"] is True else given["compile"]) if given["compile"] else None,
            checkpoints=given["checkpoints"] if lasting else None,
            resume=given["resume"] if lasting else None,
            run_name=check_name(given["run_name"]),
            folder=local(given["folder"]),
        )

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
        from hocket.masking import masked

        attached: dict[str, Any] = {}
        for attachment in attachments:
            attached.setdefault(attachment.kind, {})[attachment.name] = plain(attachment.config)
        return {name: masked(plain(value), name) for name, value in self.given.items() if name not in _PARTS} | attached

    def of_all_ranks(self) -> dict[str, Any]:
        """Return the arguments that have to be equal on all ranks."""
        return {name: value for name, value in self.given.items() if name not in _OF_EACH_RANK}

    def given_on_all_ranks(self) -> dict[str, bool]:
        """Return whether each argument was given that either all ranks or no rank must be given, with any value."""
        return {name: self.given[name] is not None for name in _PRESENCE}


def microbatch(given: Any) -> Any:
    """Return a valid number of samples, "auto" or None. Raises ValueError."""
    if given is None or given == "auto":
        return given
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise WrongValue(f"«microbatch={given!r}» is not a number of samples; give a positive int, 'auto' or «None».")
    return given


def _sanity_eval(given: Any) -> int:
    try:
        return batches(given, "sanity_eval") if given else 0
    except ValueError as error:
        raise WrongValue(f"{error} To evaluate nothing before training, give 0.") from None


def _accumulate(given: Any) -> int | None:
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


def clipping(argument: str, given: Any) -> tuple[Any, float] | None:
    """Return the kind and threshold of gradient clipping, or None. Raises ValueError, naming the argument."""
    if given is None:
        return None
    kind, threshold = given if isinstance(given, tuple | list) and len(given) == 2 else ("norm", given)
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if kind not in ("norm", "value", "adaptive") or not number or not threshold > 0:
        raise WrongValue(
            f"«{argument}={given!r}» is neither a positive norm, such as 1.0, nor a kind and a threshold: ('norm', 1.0), "
            f"('value', 0.5) or ('adaptive', 0.01). For no clipping write «{argument}=None»."
        )
    return kind, float(threshold)


def reduction(given: Any) -> Any:
    """Return a valid reduction of a loss, or None. Raises ValueError."""
    if given is not None and given not in get_args(Reduction):
        raise WrongValue(
            f"«loss_reduction={given!r}» is neither 'mean' nor 'sum', 'batch' (over the whole batch, as a contrastive loss) or "
            "'gathered' (the same, gathered over ranks by the loss). Give one of them, or «None» to use the reduction of the "
            "loss function."
        )
    return given


def policy(given: Any) -> Policy:
    """Return a valid policy for non-finite values. Raises ValueError."""
    if given not in get_args(Policy):
        raise WrongValue(f"«nonfinite={given!r}» is not a policy; use 'raise', 'skip' or 'warn'.")
    return given  # type: ignore[no-any-return]  # just checked


def plain(value: Any) -> Any:
    """Return JSON-like values unchanged, and other objects as their class names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return getattr(value, "__qualname__", None) or type(value).__qualname__
