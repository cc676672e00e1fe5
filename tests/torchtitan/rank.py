"""One rank of a job of torchtitan's own trainer, on CPUs. Arguments: settings as JSON, and a file for the numbers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.tools import utils

CPU = ModuleType("cpu")
vars(CPU).update(
    vars(torch.cpu),
    current_device=lambda: 0,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=2**34),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
# Before the other modules take them from here: where it finds no accelerator, torchtitan trains on CUDA.
utils.device_type, utils.device_module = "cpu", CPU
utils.get_local_device = lambda: torch.device("cpu")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.common import attention, decoder  # noqa: E402
from torchtitan.models.llama3 import config_registry, model_registry  # noqa: E402

from hvd_compress.distributed import Compression, FullState  # noqa: E402


def causal(self: Any, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **options: Any) -> Tensor:
    """Stand in for FlexAttention, whose backward pass needs a GPU."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def stand_in() -> None:
    """Replace what CPUs do not have, or PyTorch 2.13 not yet."""
    attention.FlexAttention.forward = causal
    decoder.Decoder.get_attention_masks = lambda model, positions: None
    distributed.set_pg_timeouts = lambda timeout, parallel_dims: None


def words(parent: Path) -> Path:
    """Write a tokenizer of bytes for this rank, and have it read Python's own source; return its folder."""
    folder = parent / f"words{os.environ['RANK']}"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    text = Path(json.__file__).with_name("decoder.py").read_text()
    pieces = Dataset.from_dict({"text": [text[begin : begin + 500] for begin in range(0, len(text), 500)]})
    text_datasets.DATASETS["c4_test"] = DatasetConfig(
        path="", loader=lambda path: pieces, sample_processor=lambda sample: sample["text"]
    )
    return folder


def configuration(settings: dict[str, Any], folder: Path) -> Any:
    """Return torchtitan's tiny Llama 3, with the settings of a job."""
    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.hf_assets_path, config.dump_folder = str(words(folder)), str(folder)
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.steps, config.training.disable_cuda_graphs = settings["steps"], True
    config.validator.enable, config.debug.seed = False, 0
    config.checkpoint.enable, config.checkpoint.interval = "interval" in settings, settings.get("interval", 100)
    config.parallelism.spmd_backend = settings.get("backend", "partial_dtensor")
    config.parallelism.data_parallel_replicate_degree = settings.get("replicas", 1)
    config.parallelism.tensor_parallel_degree = settings.get("tensor", 1)
    return config


def train(settings: dict[str, Any], folder: Path) -> list[tuple[int, float, float]]:
    """Train; return the number, the loss and the norm of the gradients of each step."""
    numbers: list[tuple[int, float, float]] = []
    trainer = configuration(settings, folder).build()
    log = trainer.metrics_processor.log

    def noted(step: int, loss: float, most: float, norm: float, **more: Any) -> None:
        numbers.append((step, float(loss), float(norm)))
        log(step, loss, most, norm, **more)

    trainer.metrics_processor.log = noted
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other reductions
    if "spec" in settings:
        compression = Compression.parse(settings["spec"])
        for part in trainer.model_parts:
            compression.register(part, gather=settings.get("gather", "none"))
        if "interval" in settings:
            trainer.checkpointer.states["compression"] = FullState(compression)
    trainer.train()
    trainer.close()
    if "spec" in settings and settings["spec"] != "none":
        assert compression.stats().bytes_sent < 0.6 * compression.stats().gradient_bytes
    return numbers


if __name__ == "__main__":
    out = Path(sys.argv[2])
    stand_in()
    found = train(json.loads(sys.argv[1]), out.parent)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()
