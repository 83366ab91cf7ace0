"""Distributed helpers: sharded tensors, comparison of arguments over ranks, and agreement during training."""
