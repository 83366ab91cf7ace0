"""Batches, samplers and loaders."""

from hocket.data.per_sample import SeededDataset, seeded

__all__ = ["SeededDataset", "seeded"]
