"""The components of a Trainer's checkpoints; `hocket_checkpoints.content` lists them in order."""
