"""A recurrent language model with truncated back-propagation through time (Mikolov et al. 2010; Zaremba et al. 2014,
arXiv:1409.2329) of the words of a module of Python's standard library.

The text is laid out as 16 long rows. A batch is the next 24 words of each, and the hidden state of its last word begins the
next batch, without its graph. The state is split into microbatches with the rows, divided over ranks by `global_batch`, and
saved in checkpoints for each rank.

    python examples/word_language_model.py
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hocket

ROWS, LENGTH = 16, 24
TEXT = re.findall(r"\w+|[^\w\s]", inspect.getsource(argparse))
WORDS = ["<unknown>", *(word for word, times in Counter(TEXT).most_common() if times > 2)]


class LanguageModel(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(len(WORDS), 64), nn.LSTM(64, 96, batch_first=True)
        self.decoder = nn.Linear(96, len(WORDS))
        self.state: Any = None

    def forward(self, words: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return scores of the next words, and the state: pairs of (rows, layers, features), with rows first to be split."""
        state = state and tuple(each.transpose(0, 1).contiguous() for each in state)
        outputs, state = self.lstm(self.embedding(words), state)
        return self.decoder(outputs), tuple(each.transpose(0, 1) for each in state)

    def train_batch(self, text: Tensor, step: Any) -> None:
        if step.batch_in_epoch == 0:
            self.state = None
        self.state = step(self.text_loss, text, carry=self.state).kept

    def text_loss(self, text: Tensor, state: Any) -> hocket.Loss:
        scores, state = self(text[:, :-1], state)
        return hocket.Loss(cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()), kept=state)

    def extra_state(self) -> Any:
        return self.state

    def load_extra_state(self, state: Any) -> None:
        self.state = state


def data() -> list[Tensor]:
    numbers = {word: number for number, word in enumerate(WORDS)}
    rows = torch.tensor([numbers.get(word, 0) for word in TEXT[: len(TEXT) // ROWS * ROWS]]).view(ROWS, -1)
    return [rows[:, start : start + LENGTH + 1] for start in range(0, rows.size(1) - LENGTH, LENGTH)]


def make_trainer(**changes: Any) -> hocket.Trainer:
    options = {"model": LanguageModel(), "train_data": data(), "global_batch": ROWS, "optimizer": "adam(lr=5e-3)"}
    return hocket.Trainer(**{**options, "clip_gradients": 0.25, "duration": "8ep", "seed": 1, **changes})


if __name__ == "__main__":
    model = LanguageModel()
    losses = torch.tensor(make_trainer(model=model, loggers=["progress"]).fit().history["train/loss"])
    print(
        f"perplexity of {len(WORDS)} words: {losses[:10].mean().exp():.0f} at first, {losses[-10:].mean().exp():.1f} now"
    )
    word, state = torch.tensor([[WORDS.index("def")]]), None
    for _ in range(60):
        print(WORDS[word], end=" ", flush=True)
        scores, state = model.cpu()(word, state)
        word = scores[:, -1].softmax(1).multinomial(1)
