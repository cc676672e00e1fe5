"""A model whose stages are on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hvd_compress.core.method import check_range
from hvd_compress.errors import BoundaryError, SpecError
from hvd_compress.pipeline.schedule import one_f_one_b
from hvd_compress.pipeline.settings import Settings
from hvd_compress.pipeline.streams import Ids
from hvd_compress.pipeline.torch.boundary import CompressedBoundary
from hvd_compress.pipeline.torch.end import End, Link
from hvd_compress.pipeline.torch.layout import connect
from hvd_compress.pipeline.traffic import BoundaryStats

Stage = nn.Module | Callable[[], nn.Module]
Boundaries = CompressedBoundary | Sequence[CompressedBoundary]


class Pipeline:
    """Trains a model that is cut into stages, one on each rank.

    With S stages, rank r has stage ``r % S`` of replica ``r // S``. A step cuts its minibatch into microbatches and
    processes them in the order 1F1B (see `hvd_compress.pipeline.schedule`). Gradients accumulate in ``.grad`` of this
    rank's parameters to those of the mean loss over the minibatch, as after ``loss.backward()`` of the whole model.
    Communication overlaps with computation.

    With several replicas, average the gradients by ``hvd.DistributedOptimizer(..., process_set=pipeline.replicas,
    backward_passes_per_step=microbatches)``, compressed or not.

    Args:
        stages: The parts of the model in order, as modules or as functions that make them; functions of other stages
            are not called.
        loss: Function of the last stage's output and targets that returns the mean loss of a microbatch.
        boundary: Compression between stages: one for all, or a sequence with one per boundary. None for none.
        microbatches: Number of microbatches in a minibatch.
        link: ``"mpi"``: point to point, by mpi4py; ``"horovod"``: by process sets of two ranks.
        comm: For ``link="mpi"``: the communicator; by default the world.
        device: Device of this rank's stage.
        timeout: Seconds that a stage waits for a message before it raises an error.

    Attributes:
        module: This rank's stage.
        stage: Its number.
        stages: Number of stages.
        replica: Number of the replica that this rank is part of.
        replicas: Horovod's process set of the ranks with this stage; None if there is one replica.

    Raises:
        SpecError: If an argument is not allowed.
        UnsupportedError: If Horovod cannot make process sets.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss: Callable[[Any, Tensor], Tensor],
        *,
        boundary: Boundaries | None = None,
        microbatches: int = 4,
        link: Literal["mpi", "horovod"] = "mpi",
        comm: Any = None,
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
    ) -> None:
        check_range("microbatches", microbatches, "at least 1", microbatches >= 1)
        settings = _settings(boundary, len(stages) - 1)
        connection = connect(link, comm, len(stages))
        layout = connection.layout
        self.stage, self.stages, self.replica = layout.stage, layout.stages, layout.replica
        self.replicas = connection.replicas
        self._device = torch.device(device)
        made = stages[self.stage]
        self.module = (made if isinstance(made, nn.Module) else made()).to(self._device)
        self._loss, self._microbatches = loss, microbatches

        def end(place: int, link: Link | None) -> End | None:
            name, ahead = f"boundary{place}", place == self.stage
            return End(settings[place], name, link, ahead, self._device, timeout) if link else None

        self._back, self._ahead = end(self.stage - 1, connection.back), end(self.stage, connection.ahead)
        self._name = f"stage {self.stage} (rank {layout.rank})"
        self._broken = ""

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, which takes the inputs."""
        return self._back is None

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which takes the targets."""
        return self._ahead is None

    def step(self, inputs: Tensor | None = None, targets: Tensor | None = None, ids: Ids = None) -> float | None:
        """Run the forward and backward passes of a minibatch; call it on all ranks.

        Args:
            inputs: Inputs, on the first stage; the first axis is that of samples. Other stages ignore them.
            targets: Targets, on the last stage.
            ids: Ids of the samples, on the first stage, if a boundary has a memory of ``aqsgd``.

        Returns:
            The mean loss over the minibatch on the last stage, None on others.

        Raises:
            BoundaryError: If the minibatch is not allowed, or another stage has failed. All stages raise the same
                error, and the pipeline cannot be used any more.
        """
        with self._telling_others():
            parts, labels = self._parts(inputs, "inputs", self.is_first), self._parts(targets, "targets", self.is_last)
            names = () if ids is None else self._parts(torch.as_tensor(ids), "ids", self.is_first)
            self._expect(forward=True, backward=True)
            samples, total = sum(len(part) for part in labels), 0.0
            running: dict[int, tuple[Tensor, Tensor]] = {}
            for action, number in one_f_one_b(self.stage, self.stages, self._microbatches):
                if action == "backward":
                    self._go_back(*running.pop(number), number)
                    continue
                x, y = self._go_forward(parts, names, number, training=True)
                if self.is_last:
                    y = self._loss(y, labels[number]) * (len(labels[number]) / samples)
                    total += y.item()
                running[number] = x, y
            return total if self.is_last else None

    def evaluate(self, inputs: Tensor | None = None) -> Tensor | None:
        """Run the forward pass of a minibatch, with all stages in evaluation mode; call it on all ranks.

        Args:
            inputs: Inputs, on the first stage.

        Returns:
            The output of the model on the last stage, None on others.

        Raises:
            BoundaryError: As `step`.
        """
        was_training = self.module.training
        self.module.eval()
        try:
            with self._telling_others(), torch.no_grad():
                parts = self._parts(inputs, "inputs", self.is_first)
                self._expect(forward=True, backward=False)
                outputs = [self._go_forward(parts, (), number, False)[1] for number in range(self._microbatches)]
                return torch.cat(outputs) if self.is_last else None
        finally:
            self.module.train(was_training)

    def stats(self) -> dict[str, BoundaryStats]:
        """Return the traffic of this stage's boundaries in training so far, by names such as ``"0-1"``."""
        ends = {f"{self.stage - 1}-{self.stage}": self._back, f"{self.stage}-{self.stage + 1}": self._ahead}
        return {name: end.stats() for name, end in ends.items() if end is not None}

    def _parts(self, batch: Tensor | None, name: str, needed: bool) -> Sequence[Tensor]:
        """Return the microbatches of a minibatch; none if this stage does not need it.

        Raises:
            BoundaryError: If it is missing or too small.
        """
        if not needed:
            return ()
        if batch is None:
            raise BoundaryError(f"{self._name} needs {name}: give them on this rank")
        if len(batch) < self._microbatches:
            raise BoundaryError(
                f"{len(batch)} {name} cannot be cut into {self._microbatches} microbatches: leave out the last"
                " minibatch (drop_last=True), or take fewer microbatches"
            )
        return torch.tensor_split(batch.to(self._device), self._microbatches)

    def _expect(self, forward: bool, backward: bool) -> None:
        if self._back is not None:
            self._back.expect(self._microbatches * forward)
        if self._ahead is not None:
            self._ahead.expect(self._microbatches * backward)

    def _go_forward(
        self, parts: Sequence[Tensor], names: Sequence[Tensor], number: int, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass of a microbatch, and return the input and output of this stage."""
        if self._back is None:
            x, ids = parts[number], names[number].cpu().numpy() if names else None
        else:
            x, ids = self._back.receive(number, training)
            x.requires_grad_(training)
        y = self.module(x)
        if self._ahead is not None:
            self._ahead.send(y.detach(), number, training, ids)
        return x, y

    def _go_back(self, x: Tensor, y: Tensor, number: int) -> None:
        gradient = None if self._ahead is None else self._ahead.receive(number, training=True)[0]
        torch.autograd.backward(y, gradient)
        if self._back is not None:
            self._back.send(x.grad if x.grad is not None else torch.zeros_like(x), number, training=True)

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Tell the neighbours if this stage fails in this context, as they would wait forever."""
        if self._broken:
            raise BoundaryError(f"{self._name} has stopped ({self._broken}): make the pipeline anew")
        try:
            yield
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            for end in (self._back, self._ahead):
                if end is not None:
                    end.stop(f"{type(error).__name__}: {self._broken}")
            raise


def _settings(boundary: Boundaries | None, places: int) -> list[Settings]:
    """Return the settings of each boundary."""
    if boundary is None:
        boundary = CompressedBoundary()
    if isinstance(boundary, CompressedBoundary):
        return [boundary.settings] * places
    if len(boundary) != places:
        raise SpecError(f"boundary has {len(boundary)} elements: {places + 1} stages have {places} places between them")
    return [one.settings for one in boundary]
