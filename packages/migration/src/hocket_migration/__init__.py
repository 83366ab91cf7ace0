"""Projects written for Lightning, Composer, transformers or Accelerate, run by hocket.

Each framework has a package of its own, which imports the framework when it is first used: `hocket_migration.lightning`,
`hocket_migration.composer`, `hocket_migration.transformers`. ``hocket migrate`` reads projects without importing them.
"""
