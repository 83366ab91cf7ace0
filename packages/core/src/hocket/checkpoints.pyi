from hocket_checkpoints import *  # noqa: F403
