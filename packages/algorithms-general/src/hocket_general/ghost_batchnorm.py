"""Ghost batch normalisation: the statistics of small parts of a batch.

Source: Hoffer et al. 2017, "Train longer, generalize better", arXiv 1705.08741, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket.help import warn
from hocket.surgery import NoEffectWarning, Replacement, recast
from hocket_general.module_substitution import Substitution, SurgeryAlgorithm, not_plain


class _Ghost(nn.modules.batchnorm._BatchNorm):
    """Batch norm that in training normalises each part of about ``ghost_batch_size`` samples by its own statistics."""

    ghost_batch_size: int
    _has_trained = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        parts = self._parts(input)
        if not self._has_trained and not torch.compiler.is_compiling():
            self._has_trained = True
            if parts == 1:
                _say_no_effect(input.shape[0], self.ghost_batch_size)
        if parts == 1:
            return super().forward(input)
        return torch.cat([super(_Ghost, self).forward(part) for part in input.tensor_split(parts)])

    def _parts(self, input: Tensor) -> int:
        samples = input.shape[0]
        # A part with one value per channel has no variance.
        smallest = 2 if input.shape[2:].numel() == 1 else 1
        return max(1, min(-(-samples // self.ghost_batch_size), samples // smallest))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_batch_size={self.ghost_batch_size}"


def _say_no_effect(samples: int, size: int) -> None:
    """Warn about a first batch that is not split. Layers that see the same batch say the same, which Python shows once."""
    warn(
        f"GhostBatchNorm has no effect on batches of {samples} samples, which are one ghost batch of "
        f"«ghost_batch_size={size}». Lower it below the samples in a rank's microbatch, or remove it.",
        NoEffectWarning,
    )


class GhostBatchNorm1d(_Ghost, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` with ghost batches."""


class GhostBatchNorm2d(_Ghost, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` with ghost batches."""


class GhostBatchNorm3d(_Ghost, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` with ghost batches."""


_KINDS: dict[type[nn.Module], type[_Ghost]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


@dataclass(frozen=True)
class _Rule(Substitution):
    ghost_batch_size: int

    method = "GhostBatchNorm"
    made = _Ghost
    nothing = "it has no BatchNorm1d, BatchNorm2d or BatchNorm3d. Remove GhostBatchNorm."

    def __post_init__(self) -> None:
        if self.ghost_batch_size < 1:
            raise WrongValue(
                f"GhostBatchNorm was given «ghost_batch_size={self.ghost_batch_size}»: give the number of samples that are "
                "normalised together, such as 32."
            )

    @property
    def becomes(self) -> str:  # type: ignore[override]
        return f"in ghost batches of {self.ghost_batch_size}"

    def wants(self, module: nn.Module) -> bool:
        return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, _Ghost)

    def obstacle(self, module: nn.Module) -> str:
        if isinstance(module, nn.SyncBatchNorm):
            return "SyncBatchNorm, which makes batches larger where ghost batches make them smaller"
        return not_plain(module, tuple(_KINDS))

    def build(self, module: Any) -> nn.Module:
        return recast(module, _KINDS[type(module)], ghost_batch_size=self.ghost_batch_size)


def ghost_batchnorm(model: nn.Module, *, ghost_batch_size: int = 32) -> tuple[nn.Module, list[Replacement]]:
    """Let batch norm normalise parts of ``ghost_batch_size`` samples by themselves in training, in place.

    A batch of B samples is split into ``ceil(B / ghost_batch_size)`` parts of equal size, up to one sample; a part has at
    least two values per channel. Each part moves the running statistics by ``momentum``, as a batch of that size would. If the
    first batch of a layer is a single part, a NoEffectWarning says so (not in compiled models). In eval mode nothing changes.
    Parameters and buffers stay the same objects under the same names. SyncBatchNorm and subclasses of torch's layers are left
    alone; a warning names them.

    Hoffer et al. 2017, "Train longer, generalize better" (arXiv 1705.08741), algorithm 1.

    Args:
        model: any module; only its submodules are replaced.
        ghost_batch_size: number of samples that are normalised together, at least 1.

    Returns:
        The model and a record of each replacement; the list is empty if nothing matched, with a NoEffectWarning.

    Raises:
        ValueError: ``ghost_batch_size`` is less than 1.
        TypeError: the model is wrapped in DistributedDataParallel.

    Example:
        >>> import torch
        >>> from hocket_general.functional import ghost_batchnorm
        >>> model, changed = ghost_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)), ghost_batch_size=4)
        >>> out = model(torch.randn(8, 3))
        >>> bool(out[:4].mean(0).abs().max() < 1e-5)  # each half has a mean of its own
        True
    """
    return model, _Rule(ghost_batch_size).operate(model)


class GhostBatchNorm(SurgeryAlgorithm):
    """Normalise small parts of each batch by their own statistics (Hoffer et al. 2017, arXiv 1705.08741).

    Replaces batch norm of the model, once; see :func:`ghost_batchnorm`. Logs the number of replaced layers as
    ``ghost-batchnorm/modules``. Ghost batches are parts of what the model sees at once: of a microbatch of a rank.

    Example:
        >>> import hocket, hocket_general, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        >>> trainer = hocket.Trainer(model=model, algorithms=[hocket_general.GhostBatchNorm(16)], device="cpu")
        >>> model[1].ghost_batch_size
        16
    """

    def __init__(self, ghost_batch_size: int = 32) -> None:
        self.substitution = _Rule(ghost_batch_size)
