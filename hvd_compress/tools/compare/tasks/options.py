"""The options of tasks, as the user writes them: ``name=value``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from hvd_compress.core.method import check_range
from hvd_compress.engine.spec import nearest
from hvd_compress.errors import SpecError
from hvd_compress.lab import Setting
from hvd_compress.tools.compare.tasks.text import LEAST

Options = TypeVar("Options", bound="NoOptions")


@dataclass(frozen=True)
class NoOptions:
    """No options."""


@dataclass(frozen=True)
class FashionOptions(NoOptions):
    """The options of ``fashion``."""

    batch: int = 128  # Images in a step, of all ranks together
    test: int = 2000  # Test images that the model is evaluated on, the first ones; all 10,000 take long

    def __post_init__(self) -> None:
        _at_least_1(self, "batch", "test")


@dataclass(frozen=True)
class LmOptions(NoOptions):
    """The options of ``lm``."""

    vocabulary: int = 10_000  # Known words, the most frequent ones; all others are one, ``<unk>``
    hidden: int = 100  # The width of the embedding and of both layers
    dropout: float = 0.0  # The fraction of activations between layers that are dropped in training
    batch: int = 20  # Sequences in a step, of all ranks together
    words: int = 0  # Words of the text that are used, the first ones, with punctuation marks; 0 for all
    test: int = 10_000  # Words that the model is evaluated on, of the twentieth of the text that it is not trained on

    def __post_init__(self) -> None:
        _at_least_1(self, "hidden", "batch", "test")
        check_range("vocabulary", self.vocabulary, "at least 3", self.vocabulary >= 3)
        check_range("dropout", self.dropout, "at least 0 and less than 1", 0 <= self.dropout < 1)
        check_range("words", self.words, f"at least {LEAST}, or 0 for all", self.words == 0 or self.words >= LEAST)


@dataclass(frozen=True)
class TransformerOptions(NoOptions):
    """The options of ``transformer``."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    context: int = 64  # Bytes that the model sees at once
    batch: int = 32  # Windows of so many bytes in a step, of all ranks together
    steps: int = 300  # Steps of an epoch
    every: int = 100  # Steps between two evaluations; the time limit is checked at each
    test: int = 32_768  # Bytes that the model is evaluated on, of the twentieth of the text that it is not trained on
    beta1: float = 0.9  # AdamW's momentum; methods with momentum of their own train with 0
    beta2: float = 0.999
    decay: float = 0.1  # AdamW's weight decay

    def __post_init__(self) -> None:
        _at_least_1(self, "layers", "width", "heads", "context", "batch", "steps", "every")
        check_range("width", self.width, f"a multiple of heads={self.heads}", self.width % self.heads == 0)
        for name in ("beta1", "beta2"):
            check_range(name, getattr(self, name), "at least 0 and less than 1", 0 <= getattr(self, name) < 1)
        check_range("decay", self.decay, "at least 0", self.decay >= 0)


def read(kind: type[Options], task: str, given: Mapping[str, str]) -> Options:
    """Read the options of a task.

    Raises:
        SpecError: If there is no such option, or its value cannot be.
    """
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    for name in given:
        if name not in defaults:
            known = ", ".join(f"{key}={value}" for key, value in defaults.items()) or "none"
            raise SpecError(f"unknown option {name!r} of the task {task!r}{nearest(name, defaults)}; it has: {known}")
    return kind(**{name: _number(name, text, type(defaults[name])) for name, text in given.items()})


def share_of(batch: int, setting: Setting) -> int:
    """Return a rank's share of a batch; what cannot be dealt out equally is left out.

    Raises:
        SpecError: If there are more ranks.
    """
    check_range("batch", batch, f"at least {setting.size}, one for each rank", batch >= setting.size)
    return batch // setting.size


def _number(name: str, text: str, kind: type[Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise SpecError(f"{name}={text!r} is not allowed: {name} must be {wanted}") from None


def _at_least_1(options: NoOptions, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        check_range(name, value, "at least 1", value >= 1)
