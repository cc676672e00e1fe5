"""Conversions between tensors and the arrays of streams and links."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_compress.pipeline.streams import Call, Ids, check_carried
from hvd_compress.pipeline.wire import Bytes


def call_of(x: Tensor, training: bool, ids: Ids = None) -> Call:
    """Return the description of a tensor for the other end.

    Raises:
        BoundaryError: If a boundary cannot carry it.
    """
    name = str(x.dtype).removeprefix("torch.")
    check_carried(name if x.layout is torch.strided else str(x.layout), x.shape)
    return Call(tuple(x.shape), name, training, ids)


def flat(x: Tensor, call: Call) -> Tensor:
    """Return a one-dimensional copy in the precision of the computation."""
    copy: Tensor = x.detach().reshape(-1).to(getattr(torch, call.precision), copy=True)
    return copy


def shaped(x: Tensor, call: Call) -> Tensor:
    """Undo `flat`."""
    return x.reshape(call.shape).to(getattr(torch, call.dtype))


def to_host(payload: Tensor) -> Bytes:
    """Return a payload as bytes for a link."""
    data: Bytes = payload.cpu().numpy()
    return data


def from_host(payload: Bytes, device: torch.device) -> Tensor:
    """Return bytes from a link as a tensor on a device."""
    return torch.from_numpy(payload).to(device)
