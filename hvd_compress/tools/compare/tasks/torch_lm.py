"""A word-level language model, in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_compress.lab import Setting, Training
from hvd_compress.tools.compare.tasks import text
from hvd_compress.tools.compare.tasks.options import LmOptions, read, share_of
from hvd_compress.tools.compare.tasks.text import Arr

State = tuple[Tensor, Tensor]

LAYERS = 2
BPTT = 35
"""Words through which gradients flow back."""
_CHUNK = 100
"""Words of each sequence that are evaluated at once."""


class Batch(NamedTuple):
    """A piece of each sequence."""

    inputs: Tensor  # Of shape ``(batch, words)``
    targets: Tensor  # The words that follow
    first: bool  # Whether it is the first minibatch of an epoch, so that no state comes before it


class LanguageModel(nn.Module):
    """An LSTM that predicts the next word; the embedding of words serves as the output layer, too."""

    def __init__(self, words: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, LAYERS, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(words))
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return what follows each word, as logits, and the state after the last."""
        outputs, state = self.lstm(self.dropout(self.embedding(inputs)), state)
        return functional.linear(self.dropout(outputs), self.embedding.weight, self.bias), state


def lm(setting: Setting) -> Training:
    """Make a training of a language model on the text ``setting.data``; see `LmOptions`. SGD has no momentum."""
    options = read(LmOptions, "lm", setting.options)
    found = text.read(setting.data, options.vocabulary, options.words)
    task = _Modelling(found, setting, share_of(options.batch, setting), options.test)
    model = LanguageModel(len(found.words), options.hidden, options.dropout)
    return Training(
        model,
        torch.optim.SGD(model.parameters(), lr=20 if setting.lr is None else setting.lr),
        task.batches,
        task.loss,
        task.evaluate,
        metric="perplexity",
        higher_is_better=False,
        finish=math.exp,
        epochs=2,
        every=25,
        clip=0.25,
    )


class _Modelling:
    """The data of a rank, and the state that goes from one minibatch to the next."""

    def __init__(self, found: text.Text, setting: Setting, batch: int, test: int) -> None:
        self._train, self._setting, self._batch = found.train, setting, batch
        text.streams(found.train, batch, setting, BPTT + 1)  # refuses texts that are too short
        self._test = text.streams(found.test, batch, setting, 2, test)
        self._state: State | None = None

    def batches(self, epoch: int) -> Iterator[Batch]:
        turned = text.turned(self._train, self._setting, epoch)
        mine = text.streams(turned, self._batch, self._setting, BPTT + 1)
        return _batches(mine[:, : (mine.shape[1] - 1) // BPTT * BPTT + 1], BPTT)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, state = model(batch.inputs, None if batch.first else self._state)
        self._state = (state[0].detach(), state[1].detach())
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean cross entropy of a word."""
        total, count, state = 0.0, 0, None
        for batch in _batches(self._test, _CHUNK):
            inputs, targets = batch.inputs.to(self._setting.device), batch.targets.to(self._setting.device)
            logits, state = model(inputs, state)
            total += functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
        return total / count


def _batches(streams: Arr, words: int) -> Iterator[Batch]:
    """Yield so many words of each sequence at once, the last time perhaps fewer, and those that follow them."""
    length = streams.shape[1] - 1
    for begin in range(0, length, words):
        end = min(begin + words, length)
        inputs, targets = (torch.from_numpy(streams[:, begin + i : end + i].copy()) for i in (0, 1))
        yield Batch(inputs, targets, begin == 0)
