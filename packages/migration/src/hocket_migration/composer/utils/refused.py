"""Names of ``composer.utils`` that can be imported, and refuse to be called."""

from __future__ import annotations

from hocket_migration.composer.plugin_factory import no_counterpart

_URLS = "Checkpoints go to URLs: save_folder='s3://bucket/runs/a'; other files with the package fsspec."
_CHECKPOINTS = "Call trainer.save_checkpoint(name), or pass load_path= to the Trainer."
_EXPORT = "Call torch.export.export(trainer.state.model.eval(), …) after fit()."
_INSTEAD = {
    **dict.fromkeys(
        (
            "GCSObjectStore", "LibcloudObjectStore", "MLFlowObjectStore", "OCIObjectStore", "ObjectStore", "RemoteUploader",
            "S3ObjectStore", "SFTPObjectStore", "UCObjectStore", "get_file", "maybe_create_object_store_from_uri",
            "maybe_create_remote_uploader_downloader_from_uri", "validate_credentials",
        ),
        _URLS,
    ),
    **dict.fromkeys(("load_checkpoint", "save_checkpoint", "safe_torch_load"), _CHECKPOINTS),
    **dict.fromkeys(("ExportFormat", "Transform", "export_for_inference", "export_with_logger", "quantize_dynamic"), _EXPORT),
    **dict.fromkeys(("CliCompressor", "get_compressor", "is_compressed_pt"), "Checkpoints are not compressed."),
    **dict.fromkeys(
        ("configure_excepthook", "disable_env_report", "enable_env_report", "get_composer_env_dict", "print_env"),
        "Run hocket doctor, which prints the versions of everything.",
    ),
    "add_vision_dataset_transform": "Add the transform to the data set's own.",
    "extract_hparams": "Omit it: loggers get the configuration of each run.",
    "retry": "Use a package such as tenacity.",
}  # fmt: skip

globals().update({name: no_counterpart(name, instead) for name, instead in _INSTEAD.items()})
