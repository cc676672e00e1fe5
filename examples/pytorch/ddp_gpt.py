"""Train a small GPT on the bytes of any text with DistributedDataParallel, in place of AdamW with compressed updates.

Run; with ``--compression off``, it is AdamW, and PyTorch itself reduces the gradients::

    torchrun --nproc-per-node 2 examples/pytorch/ddp_gpt.py text.txt
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from stages import cut_gpt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression

SPEC = "ctk:preconditioned=on,vectors=on,min_size=0"

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path, help="a file, taken as bytes; its last tenth is for testing")
parser.add_argument("--compression", default=SPEC, metavar="SPEC|off", help="default: %(default)s")
parser.add_argument("--batch", default=16, type=int, help="pieces of text per rank and step; default: %(default)s")
parser.add_argument("--length", default=64, type=int, help="bytes per piece; default: %(default)s")
parser.add_argument("--layers", default=2, type=int, help="default: %(default)s")
parser.add_argument("--width", default=128, type=int, help="default: %(default)s")
parser.add_argument("--heads", default=4, type=int, help="default: %(default)s")
parser.add_argument("--lr", default=2e-3, type=float, help="default: %(default)s")
parser.add_argument("--decay", default=0.1, type=float, help="weight decay; default: %(default)s")
parser.add_argument("--steps", default=500, type=int, help="default: %(default)s")
parser.add_argument("--seed", default=0, type=int, help="default: %(default)s")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(args.seed)

data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
train, test = data[: -len(data) // 10], data[-len(data) // 10 :]
model = DistributedDataParallel(nn.Sequential(*cut_gpt(args.width, args.heads, args.layers, args.length, args.layers)))

optimizer: torch.optim.Optimizer
if args.compression == "off":
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.decay)
else:
    compression = Compression.parse(args.compression)
    optimizer = compression.optimizer(model, lr=args.lr, weight_decay=args.decay)
    compression.register(model, optimizer=optimizer)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(10 * step / args.steps + 0.01, (1 + math.cos(math.pi * step / args.steps)) / 2)
)


def loss(text: Tensor, begins: Tensor) -> Tensor:
    """Mean loss of the next byte, over pieces of text that begin at these places."""
    pieces = torch.stack([text[begin : begin + args.length + 1] for begin in begins])
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


generator = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    begins = torch.randint(len(train) - args.length, (args.batch,), generator=generator)
    torch.autograd.backward(loss(train, begins))
    optimizer.step()
    schedule.step()
    if step % 100 == 0 or step == args.steps:
        with torch.no_grad():
            mean = loss(test, torch.arange(0, len(test) - args.length - 1, max(1, len(test) // 64)))
        if dist.get_rank() == 0:
            print(f"step={step} loss={mean.item():.4f}", flush=True)
if dist.get_rank() == 0 and args.compression != "off":
    print(f"ratio={compression.stats().ratio:.1f}", flush=True)
dist.barrier()
dist.destroy_process_group()
