"""The built-in loggers, each declared by an entry point."""
