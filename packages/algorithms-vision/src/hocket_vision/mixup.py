"""MixUp: train on convex combinations of pairs of samples.

Source: Zhang, Cisse, Dauphin and Lopez-Paz 2018, "mixup: Beyond Empirical Risk Minimization", arXiv 1710.09412, section 2.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from hocket.basics.time import Time
from hocket.data.mixture import Mixture
from hocket.errors import WrongType
from hocket_vision.mixing import Mixer, check_alpha, draw_partners, draw_share, take_partners


def mix(inputs: Tensor, partners: Tensor, share: float) -> Tensor:
    """Return ``share * inputs + (1 - share) * inputs[partners]``: a new tensor; of uint8 inputs a rounded one."""
    if isinstance(inputs, Tensor) and inputs.dtype is torch.uint8:
        return mix(inputs.float(), partners, share).round_().to(torch.uint8)
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        found = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise WrongType(
            f"mixup takes inputs that can be averaged, a floating-point or uint8 tensor, but was given {found}. Say where the "
            "inputs are in a batch with input_key=."
        )
    mixed: Tensor = take_partners(inputs, partners).lerp_(inputs, share)
    return mixed


@overload
def mixup(
    inputs: Tensor, targets: None = None, alpha: float = 0.2, *, generator: torch.Generator | None = None
) -> Tensor: ...


@overload
def mixup(
    inputs: Tensor, targets: Any, alpha: float = 0.2, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Mixture]: ...


def mixup(inputs: Tensor, targets: Any = None, alpha: float = 0.2, *, generator: torch.Generator | None = None) -> Any:
    """Mix each sample with another one of the batch (Zhang et al. 2018, arXiv 1710.09412, equation 1).

    One ratio is drawn for the batch, from ``Beta(alpha, alpha)``. The sample itself has the larger share. That does not change
    the distribution of the batch: the ratios λ and 1 - λ give the same mixtures in another order, with the inverse permutation.

    Args:
        inputs: ``(B, ...)``, floating point or uint8.
        targets: anything with one entry for each sample: class indices, probabilities, numbers, or dicts of such.
        alpha: 0 or more; at 0 nothing is mixed, at 1 all ratios are equally likely.
        generator: source of randomness; torch's default generator if None.

    Returns:
        The mixed inputs, a new tensor; or, if targets were given, those and the `hocket.data.Mixture` of the targets.

    Raises:
        ValueError: ``alpha`` is negative.
        TypeError: ``inputs`` cannot be averaged.

    Example:
        >>> import torch
        >>> from hocket_vision.functional import mixup
        >>> images, targets = mixup(torch.rand(8, 3, 4, 4), torch.arange(8) % 3)
        >>> loss = targets.loss(torch.nn.functional.cross_entropy, torch.randn(8, 3))
    """
    check_alpha(alpha)
    share = draw_share(alpha, generator)
    share = max(share, 1 - share)
    partners = draw_partners(len(inputs), generator)
    mixed = mix(inputs, partners, share)
    return mixed if targets is None else (mixed, Mixture(targets, take_partners(targets, partners), share))


class MixUp(Mixer):
    """Train on mixtures of pairs of samples (Zhang et al. 2018, arXiv 1710.09412, equation 1).

    Mixes the batch of each rank on ``after_dataloader``; see :func:`mixup`. The loss is the same mixture of the losses for both
    targets, for any loss function of outputs and targets. Metrics of training get the targets of the sample with the larger
    share.

    Args:
        alpha: parameter of the Beta distribution of the ratio.
        start, stop: when to begin and to end, such as ``"0.9dur"``; see `hocket.Span`.
        input_key, target_key: where inputs and targets are in a batch; None for those of the Trainer, or 0 and 1.

    Example:
        >>> import hocket, hocket_vision, torch
        >>> trainer = hocket.Trainer(
        ...     model=hocket_vision.small_resnet(), loss=torch.nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     train_data=[(torch.rand(4, 1, 8, 8), torch.arange(4))], algorithms=[hocket_vision.MixUp()], device="cpu",
        ... )
        >>> result = trainer.fit()
    """

    called = "mixup"
    conflicts = ("cutmix",)

    def __init__(
        self,
        alpha: float = 0.2,
        start: str | Time | None = None,
        stop: str | Time | None = None,
        input_key: Any = None,
        target_key: Any = None,
    ) -> None:
        super().__init__(alpha, start, stop, input_key, target_key)

    def mix(self, inputs: Any, targets: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """See :func:`mixup`."""
        return mixup(inputs, targets, self.alpha, generator=generator)
