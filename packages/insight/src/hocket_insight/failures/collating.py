"""Explanations of exceptions that a DataLoader raises while it makes a batch of samples."""

from __future__ import annotations

import re
from contextlib import suppress

_FILE = "torch/utils/data/_utils/collate.py"
_RAGGED = (
    "Samples have different shapes, and a batch is one tensor. Pad them in the loader's collate_fn: def collate(samples): "
    "inputs, targets = zip(*samples); return torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.tensor(targets). "
    "For images, give all one size in the data set, such as transform=torchvision.transforms.Resize((224, 224))."
)
#: What to write instead, by a pattern of torch's message.
_CAUSES = (
    (
        r"found <class 'PIL\.",
        "The data set returns PIL images, and a batch is made of tensors. Write transform=torchvision.transforms.ToTensor() in "
        "the data set.",
    ),
    (
        r"found <class 'NoneType'>",
        "A sample, or a part of one, is None. Write a return statement at the end of the data set's __getitem__, and a number "
        "or tensor in the place of missing values.",
    ),
    (
        r"found <class '(?P<kind>[\w.]+)'>|can't convert np\.ndarray of type|found object|found <U",
        "Samples are made into batches if they are tensors, arrays, numbers, texts, or dicts, tuples and lists of them. Write "
        "torch.tensor(…) in the data set's __getitem__, or the loader's own collate_fn: DataLoader(dataset, batch_size=32, "
        "collate_fn=lambda samples: samples) for a list of samples.",
    ),
    (r"equal size|not resizable|must match except|same number of dimensions", _RAGGED),
    (
        r"^'|KeyError",
        "Samples are dicts with different keys. Return the same keys for each sample in the data set's __getitem__.",
    ),
)

_ENDED = (
    "A worker process of the DataLoader was ended from outside, by the system where memory ran out. Lower num_workers= or "
    "prefetch_factor=. With checkpoints=, resume=True continues the run."
)


def explain(error: BaseException) -> None:
    """Add a note to an exception of torch's ``default_collate``, or of a worker process that is gone. Never raises."""
    with suppress(Exception):
        text, trace, inside = str(error), error.__traceback__, _FILE in str(error).replace("\\", "/")
        while trace is not None and not inside:
            inside = trace.tb_frame.f_code.co_filename.replace("\\", "/").endswith(_FILE)
            trace = trace.tb_next
        note = next((note for pattern, note in _CAUSES if re.search(pattern, text)), "") if inside else ""
        if text.startswith("DataLoader worker (pid") or _of_a_lost_worker(error):
            note = _ENDED
        if note and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _of_a_lost_worker(error: BaseException) -> bool:
    """Whether a worker process ended while it sent a batch to this one."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return isinstance(error, EOFError | ConnectionError) and place.startswith("multiprocessing.")
