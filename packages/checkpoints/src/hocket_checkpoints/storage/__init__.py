"""Checkpoints as files: trees of plain data and tensors, in a folder or behind a URL. Does not depend on training.

| module | |
|---|---|
| `format` | writes and reads one checkpoint: a folder |
| `store`, `remote`, `urls` | several checkpoints in a folder or behind a URL; one by path or URL |
| `manifest`, `header`, `references` | the content of the files, checked before it is trusted |
| `tree_json` | plain data as JSON with references to tensors |
| `tensors`, `shards`, `snapshot`, `assembly`, `pages` | writing tensors to files, and reading them |
| `disk`, `partials`, `scratch`, `locks` | crash safety, and locks |
| `ranks` | several processes that write or read one checkpoint |
"""
