"""Images to classify, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from hvd_compress.tools.compare.tasks import data
from hvd_compress.tools.compare.tasks.data import Arr, Images
from hvd_compress.tools.compare.training import Setting

_CHUNK = 100
"""Images that are evaluated at once."""


class Classifying(ABC):
    """The data of a rank; a framework adds its tensors.

    Args:
        images: To train on and to test on.
        setting: Tells the rank.
        batch: Images in a step of this rank.
        test: How many of the test images all ranks are evaluated on, the first ones; None for all.
    """

    def __init__(self, images: Images, setting: Setting, batch: int, test: int | None = None) -> None:
        data.check_count(len(images.train), batch, setting)
        self._images, self._setting, self._batch = images, setting, batch
        self._test, self._test_labels = images.test_share(setting, test)

    def batches(self, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Of this rank: inputs and labels."""
        train, labels = self._images.train, self._images.train_labels
        for chosen in data.deal(len(train), self._batch, self._setting, epoch):
            yield self.inputs(self._images.scaled(train[chosen])), self.tensor(labels[chosen])

    def evaluate(self, model: Any) -> float:
        """The fraction that is right."""
        right = 0
        for begin in range(0, len(self._test), _CHUNK):
            logits = self.logits(model, self.inputs(self._images.scaled(self._test[begin : begin + _CHUNK])))
            right += int((logits.argmax(1) == self._test_labels[begin : begin + _CHUNK]).sum())
        return right / len(self._test)

    @abstractmethod
    def tensor(self, array: Arr) -> Any:
        """Make a tensor."""

    @abstractmethod
    def inputs(self, pixels: Arr) -> Any:
        """Make what a model takes, from an array of shape ``(images, rows, columns)``."""

    @abstractmethod
    def logits(self, model: Any, inputs: Any) -> Arr:
        """Evaluate a model."""
