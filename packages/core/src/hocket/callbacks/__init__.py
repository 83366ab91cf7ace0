"""The built-in callbacks, each declared by an entry point."""
