"""The names of weights in checkpoints of mosaicml's, as hocket's algorithms name them."""

from __future__ import annotations

import re
from collections.abc import Collection

#: Buffers that mosaicml saves, and hocket computes: the kernels of BlurPool.
_DERIVED = re.compile(r"(^|\.)(blur_filter|filt2d)$")


def derived(name: str) -> bool:
    """Whether it names a tensor that is not a weight: one that is computed from the arguments of an algorithm."""
    return _DERIVED.search(name) is not None


def here(name: str, known: Collection[str]) -> str:
    """Return hocket's name of a weight.

    Args:
        name: mosaicml's.
        known: the names in hocket's model.
    """
    if name in known:
        return name
    for pattern, replacement in _RENAMED:
        other = re.sub(pattern, replacement, name)
        if other != name and other in known:
            return other
    return name


#: Modules that mosaicml's algorithms put into a wrapper, or call otherwise: a pattern and what it becomes.
_RENAMED = (
    (r"\.conv\.(\w+)$", r".\1"),  # BlurPool, SqueezeExcite
    (r"\.se\.pool_and_mlp\.2\.weight$", ".squeeze_excite.squeeze"),
    (r"\.se\.pool_and_mlp\.4\.weight$", ".squeeze_excite.excite"),
    (r"\.batchnorm\.(\w+)$", r".\1"),  # GhostBatchNorm
    (r"\.module0\.(\w+)$", r".down.\1"),  # Factorize
    (r"\.module1\.(\w+)$", r".up.\1"),
    (r"\.parametrizations\.weight\.original$", ".weight"),  # WeightStandardization
)
