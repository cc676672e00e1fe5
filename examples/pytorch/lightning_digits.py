"""Train a small network on handwritten digits with Lightning and compressed gradients.

Run::

    python examples/pytorch/lightning_digits.py --compression powersgd:rank=4
    python examples/pytorch/lightning_digits.py --fsdp --compression qsgd:bits=8 --gather int8

It goes on where it ended if it is run again with the same ``--checkpoints`` and more ``--epochs``.
"""

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from hvd_compress.distributed import Compression, DistributedCompressor, FullState


class Compress(lightning.Callback):
    """Compress the gradients, and keep the residuals in Lightning's checkpoints."""

    def __init__(self, compression: DistributedCompressor) -> None:
        self.compression = compression

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Register the compression: by now the model is in DistributedDataParallel, or its layers are sharded."""
        layers = pl_module.layers
        sharded = isinstance(layers, FSDPModule)
        self.compression.register(layers if sharded else trainer.model, gather=args.gather)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs to a checkpoint."""
        return FullState(self.compression).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        FullState(self.compression).load_state_dict(state_dict)


class Digits(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def configure_model(self) -> None:
        """Shard the layers, with ``--fsdp``; called once the ranks are connected."""
        if args.fsdp and self.device_mesh is not None:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss."""
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.8)


parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="powersgd:rank=4", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--fsdp", action="store_true", help="shard the model by FSDP2")
parser.add_argument("--gather", default="none", help="bits of its parameters: none, int8, fp8 or int4")
parser.add_argument("--ranks", default=2, type=int, help="default: %(default)s")
parser.add_argument("--epochs", default=10, type=int, help="default: %(default)s")
parser.add_argument("--accumulate", default=1, type=int, metavar="BATCHES", help="per step; default: %(default)s")
parser.add_argument("--checkpoints", metavar="FOLDER", help="save here after each epoch, and resume from here")
args = parser.parse_args()

torch.set_num_threads(1)
lightning.seed_everything(0)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
x, test_x, y, test_y = train_test_split(images, torch.tensor(labels), train_size=1408, random_state=0)

model = Digits()
compression = Compression.parse(args.compression)
callbacks: list[lightning.Callback] = [Compress(compression)]
if args.checkpoints:
    callbacks.append(ModelCheckpoint(args.checkpoints, save_last=True))
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy=ModelParallelStrategy(args.ranks, 1) if args.fsdp else "ddp",
    devices=args.ranks,
    max_epochs=args.epochs,
    accumulate_grad_batches=args.accumulate,
    callbacks=callbacks,
    enable_checkpointing=bool(args.checkpoints),
    logger=False,
    enable_progress_bar=False,
)
batches = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
trainer.fit(model, batches, ckpt_path="last" if args.checkpoints else None)

with torch.no_grad():
    predicted = model.layers(test_x)
if trainer.is_global_zero:
    loss = nn.functional.cross_entropy(predicted, test_y).item()
    accuracy = (predicted.argmax(1) == test_y).float().mean().item()
    print(f"accuracy={accuracy:.3f} loss={loss:.6f} ratio={compression.stats().ratio:.1f}", flush=True)
