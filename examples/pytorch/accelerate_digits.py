"""Train a small network on handwritten digits with Accelerate and compressed gradients.

Run; with ``--fsdp``, Accelerate shards the model by FSDP2, which it does on GPUs only::

    torchrun --nproc-per-node 2 examples/pytorch/accelerate_digits.py --compression powersgd:rank=4
    torchrun --nproc-per-node 2 examples/pytorch/accelerate_digits.py --fsdp --compression qsgd:bits=8 --gather int8

It goes on where it ended if it is run again with the same ``--checkpoints`` and more ``--epochs``.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_compress.distributed import Compression, FullState

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="powersgd:rank=4", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--fsdp", action="store_true", help="shard the model by FSDP2")
parser.add_argument("--gather", default="none", help="bits of its parameters: none, int8, fp8 or int4")
parser.add_argument("--epochs", default=10, type=int, help="default: %(default)s")
parser.add_argument("--accumulate", default=1, type=int, metavar="BATCHES", help="per step; default: %(default)s")
parser.add_argument("--mixed-precision", default="no", choices=("no", "bf16"), help="default: %(default)s")
parser.add_argument(
    "--checkpoints", type=Path, metavar="FOLDER", help="save here after each epoch, and resume from here"
)
args = parser.parse_args()

torch.set_num_threads(1)
set_seed(0)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
x, test_x, y, test_y = train_test_split(images, torch.tensor(labels), train_size=1408, random_state=0)

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    mixed_precision=args.mixed_precision,
    gradient_accumulation_steps=args.accumulate,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if args.fsdp else None,
)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
batches = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

# The prepared model is a DistributedDataParallel, or sharded.
compression = Compression.parse(args.compression).register(model, gather=args.gather)
accelerator.register_for_checkpointing(FullState(compression))

saved = sorted(args.checkpoints.glob("epoch-*")) if args.checkpoints else []
if saved:
    accelerator.load_state(str(saved[-1]))
for epoch in range(len(saved), args.epochs):
    batches.set_epoch(epoch)
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    if args.checkpoints:
        accelerator.save_state(str(args.checkpoints / f"epoch-{epoch + 1:04}"))

with torch.no_grad():
    predicted = accelerator.unwrap_model(model)(test_x.to(accelerator.device)).cpu()
if accelerator.is_main_process:
    loss = nn.functional.cross_entropy(predicted, test_y).item()
    accuracy = (predicted.argmax(1) == test_y).float().mean().item()
    print(f"accuracy={accuracy:.3f} loss={loss:.6f} ratio={compression.stats().ratio:.1f}", flush=True)
accelerator.end_training()
