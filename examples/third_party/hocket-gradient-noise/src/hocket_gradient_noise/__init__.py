"""Annealed Gaussian noise on gradients, a plug-in for hocket."""

from hocket_gradient_noise.gradient_noise import GradientNoise, add_gradient_noise, standard_deviation

__all__ = ["GradientNoise", "add_gradient_noise", "standard_deviation"]
