"""A training of your own for ``hvd-compress compare``: a function takes a `Setting` and returns a `Training`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Setting", "Training"]


def _same(value: float) -> float:
    return value


class Setting(NamedTuple):
    """The arguments of a task.

    Attributes:
        seed: For the initial weights and the order of the data; the same on all ranks.
        rank: Of this process.
        size: How many ranks there are.
        lr: The learning rate; None for the task's own.
        momentum: Whether the optimizer may have momentum; False for methods that have their own.
        data: A file or folder that the user names; empty for the task's own.
        options: Further settings of the task, as the user wrote them.
        preconditioned: Whether the method delivers updates, which plain SGD applies, instead of gradients.
        device: Where the model and each minibatch are moved, such as ``"cuda:0"``; what ``evaluate`` tests on belongs
            there, too.
    """

    seed: int = 0
    rank: int = 0
    size: int = 1
    lr: float | None = None
    momentum: bool = True
    data: str = ""
    options: Mapping[str, str] = {}
    preconditioned: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Training:
    """A model and how it is trained.

    Attributes:
        model: Not distributed: a ``torch.nn.Module``, or a ``keras.Model`` that is built but not compiled.
        optimizer: Not distributed: a ``torch.optim.Optimizer`` of the model's parameters, or a Keras one.
        batches: From the number of an epoch to this rank's minibatches in it; every rank has as many.
        loss: From the model and a minibatch to the loss, a scalar tensor.
        evaluate: From the model to the mean of the metric over this rank's share of the test data. The shares are
            equally large. The model is in evaluation mode and on the device, and no gradients are recorded.
        metric: The name of the metric.
        higher_is_better: Whether more of it is better.
        finish: From the mean over all ranks to the metric, as ``math.exp`` makes a perplexity of a cross entropy.
        target: What is good enough, unless the user says.
        epochs: How many there are, unless the user says.
        every: Steps from one evaluation to the next.
        clip: The largest norm of the reduced gradient; longer ones are scaled down. None for no limit.
        schedule: From the part of the training that is done, 0 at its first step and 1 after its last, to a factor of
            the learning rate; None for a constant one.
    """

    model: Any
    optimizer: Any
    batches: Callable[[int], Iterable[Any]]
    loss: Callable[[Any, Any], Any]
    evaluate: Callable[[Any], float]
    metric: str = "accuracy"
    higher_is_better: bool = True
    finish: Callable[[float], float] = _same
    target: float | None = None
    epochs: int = 10
    every: int = 20
    clip: float | None = None
    schedule: Callable[[float], float] | None = None
