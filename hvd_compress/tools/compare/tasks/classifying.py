"""Images to classify, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from hvd_compress.lab import Setting, Training
from hvd_compress.tools.compare.tasks import data
from hvd_compress.tools.compare.tasks.data import SIDE, Arr, Images
from hvd_compress.tools.compare.tasks.options import FashionOptions, NoOptions, read, share_of

Batch = tuple[Any, Any]

_CHUNK = 100
"""Images that are evaluated at once."""


class Classifying(ABC):
    """The data of a rank; a framework adds models and tensors.

    Args:
        images: To train on and to test on.
        setting: Tells the rank.
        batch: Images in a step of this rank.
        test: How many of the test images all ranks are evaluated on, the first ones; None for all.
    """

    def __init__(self, images: Images, setting: Setting, batch: int, test: int | None = None) -> None:
        data.check_count(len(images.train), batch, setting)
        self._images, self.setting, self._batch = images, setting, batch
        self._test, self._test_labels = images.test_share(setting, test)

    @classmethod
    def digits(cls, setting: Setting) -> Training:
        """Make a training of the CNN of ``examples/*/digits.py``, 32 images in each step of a rank."""
        read(NoOptions, "digits", setting.options)
        task = cls(data.digits(), setting, batch=32)
        return task._training(task.cnn(8, (False, True), 128), 0.1, 0.8, target=0.95, epochs=8)

    @classmethod
    def fashion(cls, setting: Setting) -> Training:
        """Make a training of a CNN of 3.2 million parameters on Fashion-MNIST; see `FashionOptions`."""
        options = read(FashionOptions, "fashion", setting.options)
        task = cls(data.fashion(setting.data), setting, share_of(options.batch, setting), options.test)
        return task._training(task.cnn(SIDE, (True, True), 1024), 0.05, 0.9, target=0.85, epochs=2)

    def _training(self, model: Any, lr: float, momentum: float, target: float, epochs: int) -> Training:
        lr = lr if self.setting.lr is None else self.setting.lr
        optimizer = self.sgd(model, lr, momentum if self.setting.momentum else 0.0)
        return Training(
            model, optimizer, self.batches, self.loss, self.evaluate, target=target, epochs=epochs, every=10
        )

    def batches(self, epoch: int) -> Iterator[Batch]:
        train, labels = self._images.train, self._images.train_labels
        for chosen in data.deal(len(train), self._batch, self.setting, epoch):
            yield self.inputs(self._images.scaled(train[chosen])), self.tensor(labels[chosen])

    def evaluate(self, model: Any) -> float:
        right = 0
        for begin in range(0, len(self._test), _CHUNK):
            logits = self.logits(model, self.inputs(self._images.scaled(self._test[begin : begin + _CHUNK])))
            right += int((logits.argmax(1) == self._test_labels[begin : begin + _CHUNK]).sum())
        return right / len(self._test)

    @abstractmethod
    def cnn(self, side: int, pools: tuple[bool, bool], hidden: int) -> Any:
        """Return a CNN for grey images of ten classes; ``pools`` tells after which convolutions it halves the side."""

    @abstractmethod
    def sgd(self, model: Any, lr: float, momentum: float) -> Any: ...

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> Any: ...

    @abstractmethod
    def tensor(self, array: Arr) -> Any: ...

    @abstractmethod
    def inputs(self, pixels: Arr) -> Any:
        """Return what a model takes, from an array of shape ``(images, rows, columns)``."""

    @abstractmethod
    def logits(self, model: Any, inputs: Any) -> Arr: ...
