"""Data of several parts: loaders combined into one, and all data of a run as one object.

`several` has `hocket.data.Several`, on `combining`; `module` has `hocket.data.DataModule`, and `module_data` calls its methods
in a run.
"""
