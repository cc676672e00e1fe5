"""Train a small GPT-2 on the bytes of any text with Hugging Face's Trainer and compressed gradients.

Run; with ``--fsdp``, the Trainer shards the model by FSDP2, which it does on GPUs only::

    torchrun --nproc-per-node 2 examples/pytorch/huggingface_gpt.py text.txt --compression qsgd
    torchrun --nproc-per-node 2 examples/pytorch/huggingface_gpt.py text.txt --compression qsgd --fsdp --gather int8
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from hvd_compress.distributed import Compression

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path, help="a file, taken as bytes")
parser.add_argument("--compression", default="qsgd", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--fsdp", action="store_true", help="shard the model by FSDP2")
parser.add_argument("--gather", default="none", help="bits of its parameters: none, int8, fp8 or int4")
parser.add_argument("--length", default=64, type=int, help="bytes per piece; default: %(default)s")
parser.add_argument("--layers", default=2, type=int, help="default: %(default)s")
parser.add_argument("--width", default=128, type=int, help="default: %(default)s")
parser.add_argument("--lr", default=1e-3, type=float, help="default: %(default)s")
parser.add_argument("--epochs", default=3.0, type=float, help="default: %(default)s")
args = parser.parse_args()

torch.set_num_threads(1)
set_seed(0)

data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
pieces = TensorDataset(data[: len(data) // args.length * args.length].view(-1, args.length))
sizes = {"n_positions": args.length, "n_layer": args.layers, "n_embd": args.width, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes))
compression = Compression.parse(args.compression)


class Compress(TrainerCallback):
    """Compress the gradients."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the compression; the model is wrapped in DistributedDataParallel by now, or sharded."""
        compression.register(trainer.model_wrapped, gather=args.gather)


def collate(batch: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return pieces of text; the model shifts its labels itself."""
    text = torch.stack([piece for (piece,) in batch])
    return {"input_ids": text, "labels": text}


with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        use_cpu=not torch.cuda.is_available(),
        fsdp=args.fsdp,
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]} if args.fsdp else None,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        save_strategy="no",
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=pieces, data_collator=collate, callbacks=[Compress()])
    trainer.train()

if trainer.is_world_process_zero():
    loss = next(float(line["loss"]) for line in reversed(trainer.state.log_history) if "loss" in line)
    print(f"loss={loss:.6f} ratio={compression.stats().ratio:.1f}", flush=True)
