"""Train a small GPT on the bytes of any text by AdamW, and average the models of the ranks every few steps.

Run::

    torchrun --nproc-per-node 2 examples/pytorch/local_gpt.py text.txt --every 30 --compression qsgd:bits=4
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from stages import cut_gpt
from torch import Tensor, nn

from hvd_compress.distributed import LocalSteps, Outer

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path, help="a file, taken as bytes; its last tenth is for testing")
parser.add_argument("--preset", default="", metavar="diloco|streaming|sparseloco", help="published settings")
parser.add_argument("--every", default=30, type=int, help="steps between two averages; default: %(default)s")
parser.add_argument("--compression", metavar="SPEC", help="default: none, or that of the preset")
parser.add_argument("--outer-lr", type=float, help="default: 1, or that of the preset")
parser.add_argument("--batch", default=16, type=int, help="pieces of text per rank and step; default: %(default)s")
parser.add_argument("--length", default=64, type=int, help="bytes per piece; default: %(default)s")
parser.add_argument("--layers", default=2, type=int, help="default: %(default)s")
parser.add_argument("--width", default=128, type=int, help="default: %(default)s")
parser.add_argument("--heads", default=4, type=int, help="default: %(default)s")
parser.add_argument("--lr", default=2e-3, type=float, help="default: %(default)s")
parser.add_argument("--steps", default=500, type=int, help="default: %(default)s")
parser.add_argument("--seed", default=0, type=int, help="default: %(default)s")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(args.seed)

data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
train, test = data[: -len(data) // 10], data[-len(data) // 10 :]
model = nn.Sequential(*cut_gpt(args.width, args.heads, args.layers, args.length, args.layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(10 * step / args.steps + 0.01, (1 + math.cos(math.pi * step / args.steps)) / 2)
)

given = {"compression": args.compression, "outer": args.outer_lr and Outer(lr=args.outer_lr)}
options = {name: value for name, value in given.items() if value is not None}
local = LocalSteps(optimizer, args.preset, every=args.every, **options)


def loss(text: Tensor, begins: Tensor) -> Tensor:
    """Mean loss of the next byte, over pieces of text that begin at these places."""
    pieces = torch.stack([text[begin : begin + args.length + 1] for begin in begins])
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def test_loss() -> float:
    """Loss on the last tenth of the text, by the parameters of this rank."""
    with torch.no_grad():
        return loss(test, torch.arange(0, len(test) - args.length - 1, max(1, len(test) // 64))).item()


generator = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    begins = torch.randint(len(train) - args.length, (args.batch,), generator=generator)
    torch.autograd.backward(loss(train, begins))
    optimizer.step()  # and what is due after it
    schedule.step()
    if step % 100 == 0:
        own = test_loss()
        with local.averaged():
            print(f"rank={dist.get_rank()} step={step} own={own:.4f} averaged={test_loss():.4f}", flush=True)
local.finish()
if dist.get_rank() == 0:
    sent, ratio = local.stats().bytes_sent / args.steps, local.stats().ratio
    print(f"loss={test_loss():.4f} bytes_per_step={sent:.0f} ratio={ratio:.1f}", flush=True)
dist.barrier()
dist.destroy_process_group()
