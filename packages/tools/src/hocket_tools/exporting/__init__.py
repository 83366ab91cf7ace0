"""Export a trained model, and run the exported files to compare their outputs with those of ``trainer.predict``.

`exporter` writes and verifies what `preparing` prepares. `observing` records predictions of the run, `portable` makes the model
a function of named tensors, `graphs` traces it, and `formats` writes and reads files. `verification` compares, and `manifest`
describes.
"""
