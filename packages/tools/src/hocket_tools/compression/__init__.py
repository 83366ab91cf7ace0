"""Smaller models: quantized, pruned, and compared with the original."""
