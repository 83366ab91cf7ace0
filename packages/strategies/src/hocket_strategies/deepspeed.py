"""ZeRO."""

from hocket_strategies.group import RankStrategy


class DeepSpeed(RankStrategy):
    """To be written."""
