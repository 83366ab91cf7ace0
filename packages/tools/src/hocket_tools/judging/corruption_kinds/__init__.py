"""The corruptions by family. Images are `(C, H, W)` in [0, 1]; results may leave that range."""
