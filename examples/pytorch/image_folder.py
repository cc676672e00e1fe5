"""Images in folders, one folder for each class, for imagenet_resnet50.py."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Dataset of images, float32 of shape ``(3, size, size)``, and their classes.

    Args:
        folder: Has a folder for each class.
        size: Of what is cut out: a random piece, and mirrored or not, to train on; else the middle.
        train: Whether to train on it.
    """

    def __init__(self, folder: Path, size: int, train: bool) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self._files = [
            (path, number) for number, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())
        ]
        self._size, self._train = size, train

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, number = self._files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        share, (left, top), mirrored = 0.875, (0.5, 0.5), False
        if self._train:
            draw = torch.rand(4).tolist()
            share, left, top, mirrored = (0.08 + 0.92 * draw[0]) ** 0.5, draw[1], draw[2], draw[3] < 0.5
        side = share * min(image.size)
        left, top = left * (image.width - side), top * (image.height - side)
        image = image.resize((self._size, self._size), box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if mirrored:
            pixels = pixels.flip(2)
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1), number
