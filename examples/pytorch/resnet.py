"""ResNet-50 (He et al. 2015, with the stride in the 3x3 convolution), for imagenet_resnet50.py."""

from torch import Tensor, nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Channels inside a block, and blocks, of each stage."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; gives four times ``inner`` channels."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        last = nn.BatchNorm2d(4 * inner)
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, 4 * inner, 1, bias=False),
            last,
        )
        nn.init.zeros_(last.weight)  # each block begins as its shortcut (Goyal et al. 2017)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != 4 * inner:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape ``(batch, channels, height, width)``."""
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet50(classes: int) -> nn.Sequential:
    """The whole model, for images of shape ``(batch, 3, height, width)``."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 64
    for inner, blocks in STAGES:
        for block in range(blocks):
            layers.append(Bottleneck(channels, inner, 2 if block == 0 and inner > 64 else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
