"""The components of a Trainer's checkpoints; `hocket.checkpoints.content` lists them in order."""
