"""What every floor above uses: times, files, masking, random numbers, losses, kinds of plug-ins, launchers."""
