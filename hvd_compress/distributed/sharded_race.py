"""Choose the method of a sharded model by the times of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from hvd_compress.distributed.sharded_buckets import GroupBuckets
from hvd_compress.distributed.sharded_step import Step
from hvd_compress.engine.race import Race, Stage
from hvd_compress.engine.survey import Facts, Found, Part, joined, survey_bucket
from hvd_compress.methods.wrappers.alternatives import choice_of
from hvd_compress.torch.autotune import Tuner
from hvd_compress.torch.bucket_state import BucketState
from hvd_compress.transport.protocol import TrainingTransport, Transport


class ShardedRace:
    """The race of a sharded model.

    FSDP uses each sum at once, so gradients are surveyed as they come. A step is told to the race when the next one
    begins: only then is it known, without a device synchronisation of its own, whether all gradients were finite.

    Args:
        race: The race.
        label: Label of the reducer.
        device: Device of the gradients.
        unable: Numbers of candidates that some group cannot use, whatever a survey finds in others.

    Attributes:
        race: The race.
    """

    def __init__(self, race: Race, label: str, device: torch.device, unable: Collection[int]) -> None:
        self.race, self._unable = race, unable
        self._tuner = Tuner(race, label, device)
        self._found: list[Found | None] = []

    def expect(self, adam: bool) -> None:
        """Go on with the candidates of another optimizer, or of one that is known now."""
        if adam != self.race.adam:
            self.race.adam = adam
            self._found = [None]  # the survey is to be made again

    def begin_step(self, last: Step | None, transport: TrainingTransport, sleep: Callable[[float], object]) -> None:
        """Choose the candidate of a step, given the last one; all ranks that hold the model call it together.

        Args:
            last: The last step; None if there was none, or if it was discarded.
            transport: Transport of these ranks.
            sleep: See `hvd_compress.torch.waiting.nap`.
        """
        found, self._found = self._found, []
        if last is None or (self.race.compares and not last.finite):
            self._tuner.skip_step()
            return
        if self.race.asks is Stage.SURVEY:
            self.race.facts = self._facts(found)
        self._tuner.end_step(transport)
        self._tuner.decide(transport, sleep)

    def _facts(self, found: Sequence[Found | None]) -> list[Facts] | None:
        """Return the facts of all candidates in all groups, which are reduced one after another."""
        numbers = self.race.surveyed
        facts = joined(found, len(numbers))
        if facts is None:
            return None
        cannot = [number in self._unable for number in numbers]
        return [one._replace(error=math.nan) if no else one for one, no in zip(facts, cannot, strict=True)]

    def begin_exchange(
        self, buckets: GroupBuckets, bucket: BucketState, grad: Tensor, scale: float, transport: Transport
    ) -> None:
        """Choose the candidate of the first exchange of a bucket in a step, and survey its gradients if that is due.

        Args:
            buckets: The buckets of its group.
            bucket: The bucket.
            grad: Its gradients.
            scale: Their loss scale.
            transport: Transport of the exchange.
        """
        bucket.choose(self.race.choice)
        if self.race.asks is not Stage.SURVEY or choice_of(bucket.method) is None:
            return
        vector = bucket.ops.cast(grad.view(-1) / scale, bucket.bucket.dtype)
        pieces = bucket.ops.split(vector, bucket.bucket.sizes)
        part = Part(bucket.ops, bucket.bucket, bucket.method, pieces, buckets.rows)
        self._found.append(survey_bucket(part, self.race.surveyed, transport.world, transport.missing))
