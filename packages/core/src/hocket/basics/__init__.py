"""What everything else is written in: times, files, tensors of several ranks, losses, random numbers, launchers."""
