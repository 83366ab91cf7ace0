"""Predict the memory of a run, by rehearsing two steps of it on tensors without storage."""
