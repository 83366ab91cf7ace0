"""Callbacks that core brings along; each is found by its entry point."""
