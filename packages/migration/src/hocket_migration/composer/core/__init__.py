"""Composer's ``composer.core``: state, events, times, data, and the interfaces of algorithms and callbacks."""

from __future__ import annotations

from hocket.help.lazy import lazy

_PUBLIC = {
    "Algorithm": "algorithm",
    "Batch": "types",
    "Callback": "callback",
    "DataSpec": "data_spec",
    "Engine": "engine",
    "Evaluator": "evaluator",
    "Event": "event",
    "JSON": "types",
    "MemoryFormat": "types",
    "Precision": "precision",
    "State": "state",
    "Time": "time",
    "TimeUnit": "time",
    "Timestamp": "time",
    "ensure_data_spec": "data_spec",
    "ensure_evaluator": "evaluator",
    "ensure_time": "time",
    "get_precision_context": "precision",
}

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
