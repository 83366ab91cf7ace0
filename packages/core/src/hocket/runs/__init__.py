"""Read the files that runs leave on disk. Nothing here imports torch, and nothing trusts the files."""
