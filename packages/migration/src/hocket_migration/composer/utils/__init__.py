"""What projects use of Composer's ``composer.utils``."""

from __future__ import annotations

from hocket.help.lazy import lazy
from hocket_migration.composer.utils.refused import _INSTEAD

_PUBLIC = {
    **dict.fromkeys(("dist", "module_surgery", "reproducibility"), ""),
    **dict.fromkeys(
        (
            "STR_TO_DTYPE", "batch_get", "batch_set", "create_interval_scheduler", "ensure_tuple", "get_device",
            "get_free_tcp_port", "is_model_ddp", "is_model_fsdp", "is_notebook", "is_xla_installed",
            "map_collection", "model_eval_mode",
        ),
        "helpers",
    ),
    **dict.fromkeys(
        (
            "ensure_folder_is_empty", "format_name_with_dist", "format_name_with_dist_and_time", "import_object", "parse_uri",
            "partial_format",
        ),
        "names",
    ),
    **dict.fromkeys(("FSDP2Config", "FSDPConfig", "ParallelismConfig", "TPConfig"), "parallelism"),
    **dict.fromkeys(_INSTEAD, "refused"),
}  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
