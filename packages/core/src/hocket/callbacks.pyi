from hocket_insight.callbacks import *  # noqa: F403
