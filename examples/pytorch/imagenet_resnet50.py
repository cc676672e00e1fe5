"""Train ResNet-50 on a folder of images, as of ImageNet, with compressed gradients; it can be interrupted and resumed.

The folder has ``train`` and ``val``, and these have a folder of images for each class. Run::

    horovodrun --gloo -np 8 -H server1:4,server2:4 python examples/pytorch/imagenet_resnet50.py /data/imagenet \
        --compression powersgd:rank=4 --checkpoints /shared/checkpoints
"""

import argparse
import math
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from image_folder import ImageFolder
from resnet import resnet50
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from hvd_compress.torch import Compression

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--compression", default="powersgd:rank=4", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--checkpoints", type=Path, help="a folder that all ranks see; if there is one in it, it goes on")
parser.add_argument("--amp", choices=["off", "fp16", "bf16"], default="off", help="mixed precision")
parser.add_argument("--epochs", default=90, type=int, help="default: %(default)s")
parser.add_argument("--batch", default=32, type=int, help="images of each rank; default: %(default)s")
parser.add_argument("--size", default=224, type=int, help="of the images; default: %(default)s")
parser.add_argument("--lr", default=0.0125, type=float, help="learning rate of a single rank; default: %(default)s")
parser.add_argument("--lr-warm-up", default=5, type=int, help="epochs; default: %(default)s")
parser.add_argument("--workers", default=2, type=int, help="that load images, of each rank; default: %(default)s")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cpu":
    torch.set_num_threads(1)

sets = {part: ImageFolder(args.folder / part, args.size, part == "train") for part in ("train", "val")}
samplers: dict[str, DistributedSampler[Any]] = {
    part: DistributedSampler(of, hvd.size(), hvd.rank(), shuffle=part == "train", drop_last=part == "train")
    for part, of in sets.items()
}
loaders = {
    part: DataLoader(of, args.batch, sampler=samplers[part], num_workers=args.workers, drop_last=part == "train")
    for part, of in sets.items()
}
steps = len(loaders["train"])

model = resnet50(len(sets["train"].classes)).to(device)
compression = Compression.parse(args.compression)
sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-5)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), compression=compression)
scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
compression.follow(scaler)
half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.amp, torch.float32)

epoch = 0
done = sorted(args.checkpoints.glob("epoch-*/model.pt")) if args.checkpoints else []
if done:
    state = torch.load(done[-1], map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])  # Horovod's: what it wraps has no momentum any more
    scaler.load_state_dict(state["scaler"])
    compression.load(done[-1].parent / "compression")  # what this rank has not sent yet
    epoch = state["epoch"]
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def learning_rate(progress: float) -> float:
    """Grows to that of all ranks together (Goyal et al. 2017), then falls as a cosine; ``progress`` is in epochs."""
    if progress < args.lr_warm_up:
        factor = 1 + (hvd.size() - 1) * progress / args.lr_warm_up
    else:
        factor = hvd.size() * (1 + math.cos(math.pi * progress / args.epochs)) / 2
    return float(args.lr * factor)


def train() -> None:
    """One epoch."""
    model.train()
    torch.manual_seed(epoch * hvd.size() + hvd.rank())  # so that a job which is resumed sees the same images
    samplers["train"].set_epoch(epoch)
    for step, (images, labels) in enumerate(loaders["train"]):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch + step / steps)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=half, enabled=args.amp != "off"):
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
        scaler.scale(loss).backward()
        optimizer.synchronize()  # so that what the scaler looks at is the mean of all ranks
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()


def evaluate() -> float:
    """The accuracy on all ranks' images."""
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loaders["val"]:
            right += torch.tensor([(model(images.to(device)).argmax(1).cpu() == labels).sum(), len(labels)])
    right = hvd.allreduce(right, op=hvd.Sum, name="accuracy")
    return float(right[0] / right[1])


def save() -> None:
    """Each rank has a residual of its own, the rest is the same on all; once the model is there, all is there."""
    folder = args.checkpoints / f"epoch-{epoch:04}"
    compression.save(folder / "compression")
    hvd.barrier()
    if hvd.rank() == 0:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": scaler}
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, folder / "model.part")
        (folder / "model.part").rename(folder / "model.pt")


while epoch < args.epochs:
    train()
    epoch += 1
    accuracy = evaluate()
    if args.checkpoints:
        save()
    if hvd.rank() == 0:
        stats = compression.stats()
        print(f"epoch={epoch} accuracy={accuracy:.4f} bytes_per_step={stats.bytes_per_step:.0f}", flush=True)
if hvd.rank() == 0:
    print(compression.stats())
