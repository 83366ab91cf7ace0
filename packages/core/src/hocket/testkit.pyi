from hocket_testkit import *  # noqa: F403
