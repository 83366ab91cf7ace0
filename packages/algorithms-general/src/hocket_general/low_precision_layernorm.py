"""Low-precision layer norm: layer norm in 16 bits under autocast.

Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.3, whose norms read and write
16 bits and accumulate in 32; MosaicML Composer's ``LowPrecisionLayerNorm``.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hocket.surgery import Replacement
from hocket_general.low_precision_norms import LowPrecisionAlgorithm, LowPrecisionNorm, LowPrecisionRule


class _LowLayerNorm(LowPrecisionNorm, nn.LayerNorm):
    def _normalize(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


_RULE = LowPrecisionRule("LowPrecisionLayerNorm", nn.LayerNorm, _LowLayerNorm)


def low_precision_layernorm(model: nn.Module) -> tuple[nn.Module, list[Replacement]]:
    """Let every ``LayerNorm`` run in the dtype of autocast, where autocast is on, in place.

    Input, weight and bias are cast to that dtype; torch's kernels sum in float32. So the output, and what is kept for the
    backward pass, take 16 bits. Without autocast nothing changes. Parameters stay the same objects under the same names.
    Subclasses of ``LayerNorm`` are left alone; a warning names them.

    Args:
        model: any module; only its submodules are replaced.

    Returns:
        The model and a record of each replacement; the list is empty if nothing matched, with a NoEffectWarning.

    Raises:
        TypeError: the model is wrapped in DistributedDataParallel.

    Example:
        >>> import torch
        >>> from hocket_general.functional import low_precision_layernorm
        >>> model, changed = low_precision_layernorm(torch.nn.Sequential(torch.nn.LayerNorm(4)))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     model(torch.randn(2, 4)).dtype
        torch.bfloat16
    """
    return model, _RULE.operate(model)


class LowPrecisionLayerNorm(LowPrecisionAlgorithm):
    """Run layer norm in the 16-bit dtype of autocast (Micikevicius et al. 2018, arXiv 1710.03740, section 3.3).

    Replaces ``LayerNorm`` of the model, once, after other surgery; see :func:`low_precision_layernorm`. Logs the number of
    replaced layers as ``low-precision-layernorm/modules``. If the precision does not autocast to 16 bits, a NoEffectWarning
    says so and nothing is replaced.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)), precision="bf16", device="cpu",
        ...     algorithms=[hocket_general.LowPrecisionLayerNorm()],
        ... )
        >>> len(trainer.state.replacements)
        1
    """

    substitution = _RULE
