"""Batches, samplers and loaders."""
