"""Custom training loops on every strategy, precision and device: `hocket.Runtime`."""
