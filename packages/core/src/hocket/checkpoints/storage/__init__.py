"""Checkpoints as files: trees of plain data and tensors, written and read whole, here or behind a URL. Knows no training.

| module | |
|---|---|
| `format` | writes and reads one checkpoint: a folder |
| `store`, `remote`, `urls` | several checkpoints in a folder or behind a URL; one by path or URL |
| `manifest`, `header`, `references` | what is in the files, checked before it is believed |
| `plain`, `tree` | Python objects as plain data; plain data as JSON with references to tensors |
| `tensors`, `shards`, `snapshot`, `assembly`, `pages` | tensors into files, and out of them |
| `disk`, `partials`, `scratch`, `locks` | what survives a crash, and who may write |
| `ranks` | several processes that write or read one checkpoint |
"""
