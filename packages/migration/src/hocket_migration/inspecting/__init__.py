"""Read a project of another framework, without importing it, and say what becomes of each line."""
