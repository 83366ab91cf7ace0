"""Files in object stores, and chunks of them in a cache on disk. No module here imports torch."""
