"""Precisions, each found by its entry point."""
