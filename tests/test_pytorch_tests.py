"""PyTorch's own tests as ours: our hook really reduces the gradients, and how each test went is known."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

import pytorch_tests

pytestmark = pytest.mark.jobs

TOOL = Path(pytorch_tests.__file__)

TESTS = """
import os
import threading

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import DistributedTestBase, skip_if_lt_x_gpu


class DistributedDataParallelCommHookTest(DistributedTestBase):
    world_size = 2

    def gradient(self, hook=None):
        model = nn.Linear(3, 1, bias=False).to(self.rank)
        model = DistributedDataParallel(model, device_ids=[self.rank], process_group=self.create_pg("cpu"))
        if hook:
            model.register_comm_hook(state=None, hook=hook)
        model(torch.full((1, 3), float(self.rank), device=self.rank)).sum().backward()
        return model.module.weight.grad

    @skip_if_lt_x_gpu(2)
    def test_1_no_hook(self):
        self.assertEqual(self.gradient(), torch.full((1, 3), 0.5))

    def test_2_comm_hook_of_pytorch(self):
        self.assertEqual(self.gradient(default_hooks.allreduce_hook), torch.full((1, 3), 0.5))

    def test_3_comm_hook_of_another_result(self):
        def hook(state, bucket):
            future = torch.futures.Future()
            future.set_result(torch.full_like(bucket.buffer(), 7.0))
            return future

        self.assertEqual(self.gradient(hook), torch.full((1, 3), 7.0))
"""

SPEC = "topk:ratio=1.0,min_size=0"


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests above in a process of their own: ranks are forked."""
    folder = tmp_path / "test" / "distributed" / "algorithms" / "ddp_comm_hooks"
    folder.mkdir(parents=True)
    (folder / "test_ddp_hooks.py").write_text(TESTS)
    command = [sys.executable, str(TOOL), str(tmp_path), "--file", "ddp_hooks", "--logs", str(tmp_path / "logs")]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_our_hook_takes_the_place_of_pytorchs(tmp_path: Path) -> None:
    done = run(tmp_path, "-k", "test_[123]", "--spec", SPEC)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "logs").glob("*/ddp_hooks/topk*/*/record*"))]
    assert [(kind, models, calls) for _, kind, _, models, calls in records] == [("passed", 1, 1)] * 4


@pytest.mark.long
def test_a_wrong_hook_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "-k", "test_[12]", "--spec", SPEC, "--op", "sum")
    assert done.returncode == 1
    assert done.stdout.count("    numbers  test_") == 2


def test_how_a_test_went(tmp_path: Path) -> None:
    def judged(*records: tuple[object, ...], stack: str = "", skipped: bool = False) -> tuple[object, ...]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for rank in range(2):
            (folder / f"stack{rank}").write_text(stack)
        for rank, record in enumerate(records):
            (folder / f"record{rank}").write_text(json.dumps(record))
        result = unittest.TestResult()
        if skipped:
            result.addSkip(unittest.FunctionTestCase(print), "no GPU")
        return pytorch_tests.judge(result, folder, 2)

    passed = (1.0, "passed", "", 1, 1)
    assert judged(passed, passed) == ("passed", "", True)
    assert judged((3.0, "numbers", "0 is not 1", 1, 1), (2.0, "numbers", "2 is not 1", 1, 1))[:2] == (
        "numbers",
        "2 is not 1",
    )
    assert judged(passed, stack="Timeout (0:00:03)!\n")[0] == "hung"
    assert judged(passed, stack="Fatal Python error: Aborted\n")[0] == "crashed"
    assert judged(skipped=True)[:2] == ("skipped", "no GPU")
