"""What each algorithm gives on small tasks with real data: ``nox -s evidence``. The protocol: docs/explanation/evidence.md."""
