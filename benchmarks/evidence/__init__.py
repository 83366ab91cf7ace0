"""What each algorithm gives on small tasks with real data: ``nox -s evidence``. The protocol is in docs/evidence.md."""
