"""A byte-level language model with AdamW, in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_compress.core.method import check_range
from hvd_compress.lab import Setting, Training
from hvd_compress.tools.compare.tasks import data, text
from hvd_compress.tools.compare.tasks.options import TransformerOptions, read, share_of
from hvd_compress.tools.compare.tasks.text import BYTES, Arr

_WARM = 0.1
"""The part of the training in which the learning rate rises."""
_CHUNK = 32
"""Windows that are evaluated at once."""

Batch = tuple[Tensor, Tensor]
"""Windows of bytes, and the byte that follows each; of shape ``(batch, bytes)``."""


class Block(nn.Module):
    """Attention to earlier bytes, then a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes after this layer, of the shape of ``x``: ``(batch, bytes, width)``."""
        qkv = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.mlp(self.before_mlp(x))
        return found


class Transformer(nn.Module):
    """A decoder that predicts the next byte."""

    def __init__(self, options: TransformerOptions) -> None:
        super().__init__()
        width = options.width
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(options.context, width)
        self.blocks = nn.Sequential(*(Block(width, options.heads) for _ in range(options.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what follows each byte, as logits."""
        x = self.bytes(inputs) + self.places.weight[: inputs.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def transformer(setting: Setting) -> Training:
    """Make a training of a transformer with AdamW; see `TransformerOptions`.

    Methods that deliver updates, as AdamW makes them, have SGD instead. The learning rate rises for a tenth of the
    training, and falls as a cosine then.
    """
    options = read(TransformerOptions, "transformer", setting.options)
    task = _Modelling(text.read_bytes(setting.data), setting, options)
    model = Transformer(options)
    lr = 0.002 if setting.lr is None else setting.lr
    betas = (options.beta1 if setting.momentum else 0.0, options.beta2)
    optimizer: torch.optim.Optimizer
    if setting.preconditioned:
        mean = betas[0]
        optimizer = torch.optim.SGD(model.parameters(), lr, mean, dampening=mean, weight_decay=options.decay)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr, betas, weight_decay=options.decay)
    return Training(
        model,
        optimizer,
        task.batches,
        loss,
        task.evaluate,
        metric="loss",
        higher_is_better=False,
        epochs=1,
        every=options.every,
        clip=None if setting.preconditioned else 1.0,  # the norm of an update is not that of a gradient
        schedule=warm_up_and_cosine,
    )


def warm_up_and_cosine(part: float) -> float:
    """Return the factor of the learning rate when such a part of the training is done."""
    return min(part / _WARM, (1 + math.cos(math.pi * part)) / 2)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats; the batch may be elsewhere than the model."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in batch)
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class _Modelling:
    """The data of a rank: windows of a text, each one byte longer than what the model sees."""

    def __init__(self, found: text.Text, setting: Setting, options: TransformerOptions) -> None:
        self._train, self._setting, self._steps = found.train, setting, options.steps
        self._batch, self._length = share_of(options.batch, setting), options.context + 1
        data.check_count(len(found.train) // self._length, self._batch, setting)
        windows = _windows(found.test[: options.test], self._length)
        share = len(windows) // setting.size * setting.size
        least = self._length * setting.size
        check_range("test", options.test, f"at least {least} with {setting.size} ranks", share > 0)
        self._test = windows[setting.rank : share : setting.size]

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's minibatches of an epoch, which goes through the text as often as its steps need."""
        made = 0
        for reading in range(self._steps):
            number = epoch * self._steps + reading
            windows = _windows(text.turned(self._train, self._setting, number), self._length)
            for chosen in data.deal(len(windows), self._batch, self._setting, number):
                if made == self._steps:
                    return
                made += 1
                yield _batch(windows[chosen])

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean cross entropy of a byte that the model was not trained on."""
        parts = [self._test[begin : begin + _CHUNK] for begin in range(0, len(self._test), _CHUNK)]
        return sum(float(loss(model, _batch(part))) * len(part) for part in parts) / len(self._test)


def _batch(windows: Arr) -> Batch:
    numbers = torch.from_numpy(windows)
    return numbers[:, :-1], numbers[:, 1:]


def _windows(numbers: Arr, length: int) -> Arr:
    cut: Arr = numbers[: len(numbers) // length * length].reshape(-1, length).astype("int64")
    return cut
