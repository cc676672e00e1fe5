"""Bounds and claims of theory and of the papers, to stand beside what was measured."""

from __future__ import annotations

import math

from hvd_compress.methods.base import Method
from hvd_compress.methods.blockk import BlockK
from hvd_compress.methods.gtopk import GTopK
from hvd_compress.methods.natural import Natural
from hvd_compress.methods.qsgd import QSGD
from hvd_compress.methods.randomk import RandomK
from hvd_compress.methods.topk import TopK

NATURAL = 1 / 8
"""Natural compression has a second moment of 9/8 at most."""


def bound(method: Method) -> float | None:
    """Return a textbook bound on the expected normalised error of one rank's gradient, whatever the gradient is.

    With k of d coordinates top-k leaves ``1 - k/d`` at most, and random-k as much on average (scaled up to be unbiased,
    ``d/k - 1``). QSGD with s levels of the norm of d coordinates has ``min(d/s^2, sqrt(d)/s)``.

    Returns:
        The bound; None for methods that have none as simple.
    """
    if isinstance(method, RandomK) and method.unbiased:
        return 1 / method.ratio - 1
    if isinstance(method, TopK | RandomK | BlockK) and not isinstance(method, GTopK):
        return 1 - method.ratio
    if isinstance(method, Natural) and not method.twoway:
        return NATURAL
    if isinstance(method, QSGD) and not method.twoway:
        s = int(2 ** (method.bits - 1) - 1)
        return float(min(method.block / s**2, math.sqrt(method.block) / s))
    return None


CLAIMS = {
    "qsgd": "1.8x faster training of ResNet-152 on ImageNet with 16 GPUs",
    "terngrad": "no loss of accuracy with AlexNet, less than 2 % on average with GoogLeNet",
    "natural": "a second moment of at most 9/8, so a variance of at most 1/8; 3 to 4 times faster in theory",
    "onebit": "10x faster training of a speech network of 160M parameters on 20 servers with two GPUs each, small loss",
    "efsignsgd": "the convergence rate of SGD",
    "signum": "32 times less traffic; ResNet-50 on ImageNet 25 % faster on 15 machines",
    "dgc": "270 to 600 times less traffic: 97 MB become 0.35 MB for ResNet-50, 488 MB become 0.74 MB for DeepSpeech",
    "gtopk": "scales 2.7 to 12 times better than dense and 1.1 to 1.7 times better than top-k, on 32 nodes at 1 Gbit/s",
    "scalecom": "65 to 400 times less traffic with 64 learners",
    "thc": "1.40 to 1.47 times faster to the target accuracy with aggregation in switches, else 1.28 to 1.33 times",
    "loco": "14 to 40 % faster training with Adam (LLaMA, mixtures of experts), without loss",
    "homomorphic": "up to 6.33 times the throughput of aggregation and 3.74 times faster steps",
}
"""The claims of the abstracts, each for its own models, data and machines."""
