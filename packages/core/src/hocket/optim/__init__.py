"""Optimizers, their learning rates and schedules, and the clipping of gradients."""
