"""The step time of a method; the formulas are explained in docs/advise.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hvd_compress.core.method import check_range
from hvd_compress.engine.spec import parse
from hvd_compress.local.settings import settings
from hvd_compress.tools.advise.constants import Constants
from hvd_compress.tools.advise.gpus import host_seconds
from hvd_compress.tools.advise.rates import Rates
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.bench.traffic import Message, sent

_FLOAT = 4
"""Bytes."""

Framework = Literal["horovod", "ddp"]
"""System that exchanges gradients; ``ddp`` is PyTorch's DistributedDataParallel."""


class Setup(NamedTuple):
    """A training job.

    Attributes:
        params: The parameters of the model.
        ranks: How many there are.
        rate: What a host can send and receive, in bits a second; may be infinite.
        compute: Seconds of a step without any exchange, under the conditions of the job.
        latency: Seconds from one host to another.
        merge: Buckets that gradients are merged into before they are compressed.
        ranks_per_node: Ranks that share a host's link; as many on every host.
        cores_per_rank: Below 1, ranks share cores, and all that their processors do takes longer.
        side: Rows and columns of the model's matrices, which matter to low-rank methods.
        vectors: The share of the parameters in vectors, as biases, which are not compressed.
        tree: Whether small messages go along trees, as with NCCL, and not round a ring, as with Gloo.
        framework: What exchanges gradients.
        tensors: The number of gradients; 0 for that of matrices of that side.
    """

    params: int
    ranks: int
    rate: float
    compute: float
    latency: float = 50e-6
    merge: int = 2
    ranks_per_node: int = 1
    cores_per_rank: float = 1.0
    side: int = 1024
    vectors: float = 0.001
    tree: bool = False
    framework: Framework = "ddp"
    tensors: int = 0

    @property
    def gradients(self) -> int:
        """Number of gradients."""
        return self.tensors or math.ceil(self.params / matrix_side(self.params, self.side) ** 2)

    @property
    def ddp_buckets(self) -> int:
        """Buckets of DistributedDataParallel without compression: one of 1 MB, and others of 25 MB."""
        return 1 + math.ceil(max(_FLOAT * self.params - 2**20, 0) / (25 * 2**20))

    def check(self) -> None:
        """Refuse numbers that cannot be.

        Raises:
            SpecError: If there are any.
        """
        ranges = {
            "params": (self.params >= 1, "at least 1"),
            "ranks": (self.ranks >= 1, "a whole number of at least 1"),
            "rate": (self.rate > 0, "above 0"),
            "compute": (0 < self.compute < math.inf, "above 0"),
            "latency": (0 <= self.latency < math.inf, "at least 0"),
            "merge": (self.merge >= 1, "a number of buckets, at least 1"),
            "ranks_per_node": (self.ranks_per_node >= 1, "a whole number of at least 1"),
            "cores_per_rank": (0 < self.cores_per_rank < math.inf, "above 0; below 1 where ranks share cores"),
            "side": (16 <= self.side <= 4096, "in 16 .. 4096"),
            "vectors": (0 <= self.vectors < 1, "a share of the parameters, at least 0 and below 1"),
        }
        for name, (fine, allowed) in ranges.items():
            check_range(name.replace("_", "-"), getattr(self, name), allowed, fine)


def matrix_side(parameters: int, side: int) -> int:
    """Return the side of the matrices that a model is assumed to consist of: as asked for, unless it is too small."""
    return max(1, min(side, math.isqrt(parameters)))


class Prediction(NamedTuple):
    """The predicted step of one method; times in seconds.

    Attributes:
        spec: The method.
        compute: Computing alone.
        encode: Compressing, with the launches of kernels on a GPU.
        decode: Decompressing, and writing the means over the gradients.
        link: What the bytes take at the link's bandwidth, or between the GPUs of a host where that is slower.
        host: What they take on the host: sending, receiving and adding up.
        rounds: What the collectives take however few bytes they have: latency, and agreeing on what is ready.
        exchange: The last three together.
        hidden: How much of it goes on during the backward pass.
        wire: Bytes through the network device of a host.
    """

    spec: str
    compute: float
    encode: float
    decode: float
    link: float
    host: float
    rounds: float
    exchange: float
    hidden: float
    wire: float

    @property
    def step(self) -> float:
        return self.compute + self.encode + self.decode + self.exchange - self.hidden


def baseline(found: Sequence[Prediction]) -> Prediction:
    """Return the better of none and fp16."""
    return min((one for one in found if one.spec in BASELINES), key=lambda one: one.step)


def predict(spec: str, setup: Setup, rates: Rates, constants: Constants) -> Prediction:
    """Predict a step; one of local steps on average over those from one exchange to the next.

    Args:
        spec: The method, or ``SPEC@STEPS``.
        setup: The training job.
        rates: Speeds of the methods.
        constants: Constants of the machines.

    Raises:
        UnsupportedError: If the method cannot be used with so many ranks.
    """
    if "@" not in spec:
        return _predict(spec, setup, rates, constants)
    local = settings(spec, {})
    once = _predict(str(local.compression), setup, rates, constants)
    exchange = once.link + once.host + local.fragments * once.rounds
    hidden = min(exchange, local.fragments * local.delay * setup.compute)
    parts = (once.encode, once.decode, once.link, once.host, local.fragments * once.rounds, exchange, hidden, once.wire)
    return Prediction(spec, setup.compute, *(part / local.every for part in parts))


def _predict(spec: str, setup: Setup, rates: Rates, constants: Constants) -> Prediction:
    """Predict a step in which gradients are exchanged."""
    linear = parse(spec).linear
    slow = max(1.0, 1.0 / setup.cores_per_rank)
    sending = _sending(spec, setup)
    encode, decode = _coding(spec, sending[0], setup, rates)
    wire = sum(one.parameters * one.message.wire(setup.ranks, setup.ranks_per_node) for one in sending)
    link = sum(_link(one, setup, constants) for one in sending)
    own = linear and setup.framework == "horovod"
    host = sum(_work(one, setup, constants) for one in sending) * (_slow_if_it_spins(slow) if own else slow)
    rounds = sum(_round(one.message, setup, constants, slow) for one in sending if one.waits)
    exchange = link + host + rounds
    window = constants.overlap * constants.backward * setup.compute / slow
    buckets = setup.ddp_buckets if linear else setup.merge
    hidden = min(exchange, window) * (1 if own else 1 - 1 / buckets)
    coding = slow * (1.0 if linear else constants.coding)
    encode, decode = coding * encode + _launches(spec, setup, constants), coding * decode
    return Prediction(spec, setup.compute, encode, decode, link, host, rounds, exchange, hidden, wire)


def _launches(spec: str, setup: Setup, constants: Constants) -> float:
    """Return the seconds in which a host launches the kernels of a method."""
    return constants.launch * setup.gradients * host_seconds(spec.partition(":")[0])


class _Sent(NamedTuple):
    """A collective of a step."""

    message: Message  # The collective
    parameters: float  # The count of the model's parameters in it
    waits: bool = True  # False for the vectors, which travel beside the buckets; these are under way together, too


def _sending(spec: str, setup: Setup) -> list[_Sent]:
    """Return all collectives: those of the method, and one for the vectors, which it leaves uncompressed."""
    side = matrix_side(setup.params, setup.side)
    asked = sent(spec, max(2, setup.ranks), side, setup.ranks_per_node if parse(spec).hierarchical else 1)
    if parse(spec).linear:
        return [_Sent(message, setup.params) for message in asked]
    vectors = setup.vectors * setup.params
    found = [_Sent(message, setup.params - vectors) for message in asked]
    return [*found, _Sent(Message("AllReduce", _FLOAT, 0.0), vectors, waits=False)] if vectors else found


def _coding(spec: str, first: _Sent, setup: Setup, rates: Rates) -> tuple[float, float]:
    """Return the seconds of compressing and decompressing, for a rank with a core of its own.

    An allreduce of the framework only casts, at the speed of memory: 4 bytes are read and fewer written.
    """
    if parse(spec).linear:
        cast = rates.copy * (_FLOAT + first.message.bytes) / (2 * _FLOAT) if first.message.bytes < _FLOAT else 0.0
        return first.parameters * cast, first.parameters * cast
    rate, parts = rates.methods[spec], setup.ranks_per_node if parse(spec).hierarchical else 1
    own = first.parameters / parts
    return own * rate.encode, own * rate.decoding(setup.ranks // parts) + first.parameters * rates.copy


def _link(sending: _Sent, setup: Setup, constants: Constants) -> float:
    """Return the seconds at the slower one of a host's link and the bus inside it; data goes through both at once."""
    between = 8 * sending.message.wire(setup.ranks, setup.ranks_per_node) / (setup.rate * constants.efficiency)
    return sending.parameters * max(between, sending.message.sends(setup.ranks, setup.ranks_per_node) * constants.bus)


def _work(sending: _Sent, setup: Setup, constants: Constants) -> float:
    """Return the seconds of a core for sending, receiving and adding up."""
    message = sending.message
    members = message.members(setup.ranks, setup.ranks_per_node)
    bytes_sent, halves = message.sends(setup.ranks, setup.ranks_per_node), message.halves * (members - 1) / members
    return sending.parameters * (bytes_sent * constants.byte + halves * constants.half)


def _slow_if_it_spins(slow: float) -> float:
    """Return how slow Horovod's thread is where ranks share cores with a thread that spins while it waits.

    PyTorch waits for Horovod's own allreduce in a loop that never sleeps; for compressed gradients it waits asleep.
    """
    return slow * (2 - 1 / slow)


def _round(message: Message, setup: Setup, constants: Constants, slow: float) -> float:
    """Return the seconds of a collective without any bytes."""
    if setup.ranks == 1:
        return 0.0
    messages, apart = _hops(message, setup)
    if setup.framework == "horovod":  # It agrees on what is ready by an allreduce of bits
        agreeing = _hops(message._replace(kind="AllReduce"), setup)
        messages, apart = messages + agreeing[0], apart + agreeing[1]
    return slow * (constants.cycle + messages * constants.hop) + apart * setup.latency


def _hops(message: Message, setup: Setup) -> tuple[float, float]:
    """Return the messages of a collective, one after another, and how many of them go from one host to another.

    Along trees, as NCCL has them for sums, hosts are far apart only near the root.
    """
    hosts = 1 if message.scope == "node" else math.ceil(setup.ranks / setup.ranks_per_node)
    members = message.members(setup.ranks, setup.ranks_per_node)
    twice = 2 if message.kind == "AllReduce" else 1
    if setup.tree and message.kind in ("AllReduce", "Broadcast"):
        return twice * math.ceil(math.log2(members)), twice * math.ceil(math.log2(hosts))
    once = members - 1
    return twice * once, twice * once * hosts / members if hosts > 1 else 0.0
