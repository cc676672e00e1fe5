"""PyTorch's own tests as ours: our hook really reduces the gradients, and how each test went is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pytorch_tests
from horovod_tests import Verdict
from pytorch_tests import Runner

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

    def test_4_other_numbers_on_a_rank(self):
        self.assertEqual(self.rank, 0)

    def test_5_error(self):
        raise TypeError("broken")

    def test_6_hangs(self):
        if self.rank == 1:
            threading.Event().wait()

    def test_7_crashes(self):
        if self.rank == 1:
            os.abort()

    def test_8_skipped(self):
        self.skipTest("no reason")
"""

SPEC = "topk:ratio=1.0,min_size=0"


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests above in a process of their own: ranks are forked."""
    folder = tmp_path / "test" / "distributed" / "algorithms" / "ddp_comm_hooks"
    folder.mkdir(parents=True)
    (folder / "test_ddp_hooks.py").write_text(TESTS)
    command = [sys.executable, str(TOOL), str(tmp_path), "--file", "ddp_hooks", "--logs", str(tmp_path / "logs")]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False)


def test_our_hook_takes_the_place_of_pytorchs(tmp_path: Path) -> None:
    done = run(tmp_path, "-k", "test_[123]", "--spec", SPEC)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of those that pass run again with our hook" in done.stdout
    assert "test_3_comm_hook_of_another_result" in done.stdout.partition("that our hook can serve:")[2]
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "logs").glob("*/ddp_hooks/topk*/*/record*"))]
    assert [(kind, models, calls) for _, kind, _, models, calls in records] == [("passed", 1, 1)] * 4


def test_a_wrong_hook_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "-k", "test_[12]", "--spec", SPEC, "--op", "sum")
    assert done.returncode == 1
    assert done.stdout.endswith("2 fail because of compression.\n")
    assert done.stdout.count("    numbers  test_") == 2


def test_a_test_that_fails_or_hangs_or_crashes(tmp_path: Path) -> None:
    done = run(tmp_path, "-k", "test_[45678]", "--spec", SPEC, "--limit", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("    ")]
    assert [(outcome, name.split("_")[1]) for outcome, name, *_ in shown] == [
        *(("numbers", "4"), ("error", "5"), ("hung", "6"), ("crashed", "7"), ("skipped", "8"))
    ]
    texts = [text for _, _, text in shown]
    assert texts[1].startswith("TypeError: broken")
    assert "in test_6_hangs" in texts[2]
    assert texts[3].startswith("Fatal Python error: Aborted")
    assert texts[4] == "no reason"


@pytest.mark.parametrize(
    ("option", "outcome", "code"),
    [("--spec", "passed", 0), ("--spec", "numbers", 1), ("--lossy", "numbers", 0), ("--lossy", "hung", 1)],
)
def test_exit_code(option: str, outcome: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(_: Runner, __: object, spec: str, ___: object) -> dict[str, Verdict]:
        return {"test_it": Verdict(outcome if spec else "passed", "", injected=True)}

    monkeypatch.setattr(Runner, "run", judged)
    monkeypatch.setattr(pytorch_tests, "prepare", lambda *_: None)
    monkeypatch.setattr(pytorch_tests, "case_of", lambda *_: type(None))
    assert pytorch_tests.main("--file", "distributed_test", option, "topk") == code
