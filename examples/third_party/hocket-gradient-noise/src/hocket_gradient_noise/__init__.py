"""The algorithm `gradient-noise`, a plug-in for hocket, and the functions that it calls."""

from hocket_gradient_noise.gradient_noise import (
    GradientNoise,
    add_gradient_noise,
    standard_deviation,
)

__all__ = ["GradientNoise", "add_gradient_noise", "standard_deviation"]
