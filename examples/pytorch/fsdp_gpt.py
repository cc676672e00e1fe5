"""Train a small GPT on the bytes of any text with FSDP2, gradients and parameters compressed, without Horovod.

Run; with ``--compression off``, PyTorch itself reduces the gradients, in bfloat16, and with ``preconditioned=on`` in
the spec, compressed updates replace AdamW::

    torchrun --nproc-per-node 2 examples/pytorch/fsdp_gpt.py text.txt --compression qsgd:bits=8 --gather int8
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from stages import cut_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hvd_compress.distributed import Compression

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path, help="a file, taken as bytes; its last tenth is for testing")
parser.add_argument("--compression", default="qsgd:bits=8", metavar="SPEC|off", help="default: %(default)s")
parser.add_argument("--gather", default="none", metavar="none|int8|fp8|int4", help="of parameters; default: none")
parser.add_argument("--batch", default=8, type=int, help="pieces of text per rank and step; default: %(default)s")
parser.add_argument("--length", default=64, type=int, help="bytes per piece; default: %(default)s")
parser.add_argument("--layers", default=2, type=int, help="default: %(default)s")
parser.add_argument("--width", default=128, type=int, help="default: %(default)s")
parser.add_argument("--heads", default=4, type=int, help="default: %(default)s")
parser.add_argument("--lr", default=1e-3, type=float, help="learning rate of AdamW; default: %(default)s")
parser.add_argument("--steps", default=500, type=int, help="default: %(default)s")
parser.add_argument("--seed", default=0, type=int, help="default: %(default)s")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(args.seed)  # the same weights on all ranks

data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
train, test = data[: -len(data) // 10], data[-len(data) // 10 :]
model = nn.Sequential(*cut_gpt(args.width, args.heads, args.layers, args.length, args.layers))

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
reduce_dtype = torch.bfloat16 if args.compression == "off" else torch.float32
for part in (*model, model):
    fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
if args.compression != "off":
    compression = Compression.parse(args.compression)
    if "preconditioned=on" in args.compression:  # what arrives are updates of AdamW
        optimizer = compression.optimizer(model, lr=args.lr, weight_decay=0.01)
    compression.register(model, optimizer=optimizer, gather=args.gather)


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
    if step % 100 == 0 or step == args.steps:
        with torch.no_grad():
            mean = loss(test, torch.arange(0, len(test) - args.length - 1, len(test) // 64))
        if dist.get_rank() == 0:
            print(f"step={step} loss={mean.item():.4f}", flush=True)
if dist.get_rank() == 0 and args.compression != "off":
    print(f"ratio={compression.stats().ratio:.1f}", flush=True)
dist.barrier()
dist.destroy_process_group()
