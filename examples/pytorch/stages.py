"""Models that are cut into stages, for pipeline_cnn.py and pipeline_gpt.py.

One after the other the stages are the whole model, and weights do not depend on how many stages there are.
"""

from torch import Tensor, nn

STRIDES = (1, 2, 2, 2)
"""Stride of each group of two blocks; a group has twice as many channels as the previous one."""


class Block(nn.Module):
    """Residual block of a CNN: two 3x3 convolutions and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape ``(batch, channels, height, width)``."""
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def cut(width: int, stages: int) -> list[nn.Module]:
    """A CNN of the shape of ResNet-18 (He et al. 2015), for grey images and ten classes.

    Args:
        width: Channels of the first of the four groups of blocks.
        stages: How many there are: 1, 2 or 4.
    """
    if stages not in (1, 2, 4):
        raise ValueError(f"stages={stages} is not allowed: four groups make 1, 2 or 4 stages")
    layers: list[nn.Module] = [
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    channels, inner = width, width
    parts: list[nn.Module] = []
    for group, stride in enumerate(STRIDES, start=1):
        layers += [Block(channels, inner, stride), Block(inner, inner, 1)]
        channels, inner = inner, 2 * inner
        if group == len(STRIDES):
            layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
        if group % (len(STRIDES) // stages) == 0:
            parts.append(nn.Sequential(*layers))
            layers = []
    return parts


def cut_thin(width: int, stages: int) -> list[nn.Module]:
    """A CNN of one convolution in each stage, which keeps the size of images: there is much to send, little to compute.

    Args:
        width: Channels.
        stages: How many there are.
    """
    parts: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(width if place else 1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        for place in range(stages)
    ]
    parts[-1] = nn.Sequential(parts[-1], nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(49 * width, 10))
    return parts


class Embedding(nn.Module):
    """Embedding of bytes and of their positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        """From shape ``(batch, length)`` to ``(batch, length, width)``."""
        y: Tensor = self.bytes(x) + self.places.weight
        return y


class Layer(nn.Module):
    """Layer of a GPT: causal attention and a perceptron, each with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape ``(batch, length, width)``."""
        query, key, value = self.inward(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outward(y.transpose(1, 2).flatten(2))
        z: Tensor = x + self.perceptron(x)
        return z


def cut_gpt(width: int, heads: int, layers: int, length: int, stages: int) -> list[nn.Module]:
    """A GPT (Radford et al. 2019) that foretells the next byte of pieces of text.

    Args:
        width: Of what goes between layers.
        heads: Of attention.
        layers: A multiple of the stages.
        length: Of a piece, in bytes.
        stages: How many there are.
    """
    parts = [nn.Sequential(*(Layer(width, heads) for _ in range(layers // stages))) for _ in range(stages)]
    parts[0].insert(0, Embedding(width, length))
    parts[-1].extend([nn.LayerNorm(width), nn.Linear(width, 256)])
    return list(parts)
