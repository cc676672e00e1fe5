"""Emulated hosts: they are what they should be, and they are gone afterwards. For real, so it needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_compress.errors import ClusterError
from hvd_compress.tools.cluster import Cluster, network
from hvd_compress.tools.cluster.rates import bits_per_second

for_real = pytest.mark.needs("hosts")

SENT = 1_000_000

TRANSFER = f"""
import os, socket, sys
if os.environ["HOROVOD_RANK"] == "0":
    with socket.create_server(("", 4711)) as server:
        open(sys.argv[1], "w").close()  # until the other reads
        with server.accept()[0] as peer:
            left = {SENT}
            while left:
                left -= len(peer.recv(left))
    print("received by", socket.gethostname())
else:
    open(sys.argv[1]).close()
    with socket.create_connection(("h1", 4711)) as peer:
        peer.sendall(bytes({SENT}))
    print("sent by", socket.gethostname())
"""

ALLREDUCE = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.full((100_000,), hvd.rank() + 1.0), op=hvd.Sum, name="x")
print(hvd.rank(), hvd.local_rank(), hvd.size(), sorted(set(total.tolist())))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "20mbit") as made:
        yield made


def limits(cluster: Cluster) -> list[str]:
    """What tc says of the devices: of the hosts, and of the switch's ports."""
    places = [(network.host(cluster.name, number), "eth0") for number in (1, 2)]
    places += [(network.switch(cluster.name), f"port{number}") for number in (1, 2)]
    return [network.run("tc", "-s", "-n", name, "qdisc", "show", "dev", device) for name, device in places]


def remains(name: str) -> list[str]:
    """What there is of a cluster on this machine."""
    return [str(path) for folder in ("/run/netns", "/etc/netns") for path in Path(folder).glob(f"{name}-*")]


@for_real
def test_the_rate_is_in_force_both_ways_and_can_be_changed(cluster: Cluster) -> None:
    assert all("tbf" in limit and "rate 20Mbit" in limit for limit in limits(cluster))
    with pytest.raises(ClusterError, match="rate='fast' is not allowed"):
        cluster.rate = "fast"
    assert cluster.rate == "20mbit"
    cluster.rate = "1gbit"
    assert all("rate 1Gbit" in limit for limit in limits(cluster))
    for _ in range(2):
        cluster.rate = "unlimited"
        assert not any("tbf" in limit for limit in limits(cluster))
    cluster.rate = "20mbit"
    assert cluster.rate == "20mbit"
    assert all("rate 20Mbit" in limit for limit in limits(cluster))


@for_real
def test_hosts_reach_each_other_through_the_limit(cluster: Cluster, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    before = cluster.traffic()
    ended = cluster.launch([sys.executable, "-c", TRANSFER, str(tmp_path / "ready")])
    assert [(one.host, one.code, one.output) for one in ended] == [
        ("h1", 0, "received by h1\n"),
        ("h2", 0, "sent by h2\n"),
    ]
    after = cluster.traffic()
    sent, received = after[1].sent - before[1].sent, after[0].received - before[0].received
    assert SENT <= received < 1.2 * SENT
    assert SENT <= sent < 1.2 * SENT
    held_back = limits(cluster)[1].partition("overlimits ")[2]
    assert int(held_back.split()[0]) > 0


@for_real
def test_horovod_runs_across_them(cluster: Cluster) -> None:
    before = cluster.traffic()
    ended = cluster.launch([sys.executable, "-c", ALLREDUCE])
    assert [(one.code, one.output) for one in ended] == [(0, f"{rank} 0 2 [3.0]\n") for rank in range(2)]
    for was, now in zip(before, cluster.traffic(), strict=True):
        assert now.sent - was.sent > 400_000


@for_real
def test_a_host_sees_nothing_else(cluster: Cluster) -> None:
    links = cluster.run(1, ["ip", "-j", "link"])
    assert sorted(link["ifname"] for link in json.loads(links.output)) == ["eth0", "lo"]
    assert [cluster.run(number, ["hostname"]).output for number in (1, 2)] == ["h1\n", "h2\n"]


@for_real
def test_the_first_that_fails_ends_the_others(cluster: Cluster) -> None:
    program = "import os, signal, sys; sys.exit('I gave up' if os.environ['HOROVOD_RANK'] == '1' else signal.pause())"
    waiting, failed = cluster.launch([sys.executable, "-c", program])
    assert (failed.code, failed.output) == (1, "I gave up\n")
    assert waiting.code == -signal.SIGTERM


def own_network() -> str:
    links = [
        (link["ifname"], link["operstate"], link.get("qdisc")) for link in json.loads(network.run("ip", "-j", "link"))
    ]
    return f"{links} {network.run('ip', 'addr').count('inet')} {network.run('ip', 'route')}"


@for_real
def test_two_at_once_do_not_meet_and_leave_nothing(cluster: Cluster) -> None:
    before = own_network()
    with Cluster(1) as other:
        assert other.name != cluster.name
        assert len(remains(other.name)) == 3  # a host, its files, and the switch
        assert own_network() == before
        knock = [sys.executable, "-c", "import socket; socket.create_connection(('10.77.0.2', 22), 5)"]
        assert "ConnectionRefusedError" in cluster.run(1, knock).output  # from its own h2, on which nobody listens
        assert "ConnectionRefusedError" not in other.run(1, knock).output
        left_running = subprocess.Popen(network.command_on(other.name, 1, ["sleep", "600"]))
        assert left_running.poll() is None
    assert left_running.wait(10) == -signal.SIGTERM
    assert remains(other.name) == []
    assert len(remains(cluster.name)) == 5
    assert own_network() == before


@for_real
def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ClusterError("no such qdisc")

    monkeypatch.setattr(network, "limit", fail)
    cluster = Cluster(1)
    with pytest.raises(ClusterError, match="no such qdisc"):
        cluster.__enter__()
    assert remains(cluster.name) == []


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Another process with a cluster on all of whose hosts a job runs, and the cluster's name."""
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(folder)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    name = parent.stdout.readline().strip()
    assert parent.stdout.readline() == "running\n"
    return parent, name


@for_real
def test_a_second_ctrl_c_does_not_stop_the_cleaning(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = network.remove

    def interrupted(name: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        remove(name)

    monkeypatch.setattr(network, "remove", interrupted)
    with Cluster(1) as cluster:
        assert remains(cluster.name)
    assert remains(cluster.name) == []


@for_real
def test_what_a_killed_run_has_left_is_removed_by_the_next(cluster: Cluster, tmp_path: Path) -> None:
    parent, name = start(tmp_path)
    running = network.run("ip", "netns", "pids", network.host(name, 2)).split()
    assert running
    parent.kill()
    parent.communicate()
    assert len(remains(name)) == 5
    with Cluster(1):
        assert remains(name) == []
        for number in running:
            command = Path("/proc", number, "cmdline")
            assert not command.exists() or command.read_bytes() == b""  # gone, or not yet reaped
        assert len(remains(cluster.name)) == 5


def test_rates() -> None:
    rates = {"100kbit": 10**5, "2.5mbit": 2_500_000, "1gbit": 10**9, "1 Gbit": 10**9, "100gbit": 10**11}
    assert {rate: bits_per_second(rate) for rate in rates} == rates
    assert bits_per_second("unlimited") is None


def test_what_cannot_be_is_refused() -> None:
    for rate in ("", "100", "99kbit", "1tbit", "-1mbit", "1 GBps", "101gbit"):
        with pytest.raises(ClusterError, match=f"rate='{rate}' is not allowed"):
            Cluster(2, rate)
    for hosts in (0, -1, 251):
        with pytest.raises(ClusterError, match=f"hosts={hosts} is not allowed"):
            Cluster(hosts)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="need root"):
        Cluster(2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "ip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="'tc'"):
        Cluster(2)


NODES = """
import sys
import horovod.torch as hvd, torch
from hvd_compress import node_process_sets
from hvd_compress.torch import Compression

hvd.init(process_sets=node_process_sets())
for spec in ("none", sys.argv[1]):
    parameter = torch.nn.Parameter(torch.zeros(1000, 500))
    gradient = torch.randn(1000, 500, generator=torch.Generator().manual_seed(hvd.rank()))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), named_parameters=[("p", parameter)], compression=Compression.parse(spec)
    )
    for step in range(int(sys.argv[2]) if spec != "none" else 1):
        optimizer.zero_grad()
        (parameter * gradient).sum().backward()
        optimizer.step()
        exact = parameter.detach().clone() if spec == "none" else exact
print(hvd.local_rank(), hvd.cross_rank(), (parameter - exact).abs().max().item() < 1e-5)
"""


@for_real
@pytest.mark.long
@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_with_two_ranks_sum_exactly_and_send_half_of_what_they_gathered(hosts: int, tmp_path: Path) -> None:
    """Lossless methods give the sums of Horovod; of what is gathered, half passes the devices, by their counters."""
    (tmp_path / "job.py").write_text(NODES)
    environment = {"OMP_NUM_THREADS": "1"}
    with Cluster(hosts, "1gbit", ranks_per_host=2) as cluster:

        def run(spec: str, steps: int) -> tuple[list[str], int]:
            before = [one.sent for one in cluster.traffic()]
            ended = cluster.launch([sys.executable, str(tmp_path / "job.py"), spec, str(steps)], environment)
            assert [one.code for one in ended] == [0] * 2 * hosts, "\n".join(one.output for one in ended)
            sent = max(after.sent - first for after, first in zip(cluster.traffic(), before, strict=True))
            return [one.output.splitlines()[-1] for one in ended], sent

        places, _ = run("topk:ratio=1.0,hierarchical=on", 1)
        assert places == [f"{rank % 2} {rank // 2} True" for rank in range(2 * hosts)]
        for spec in ("topk:ratio=0.1", "qsgd:bits=4"):
            flat, tall = (run(f"{spec}{more}", 21)[1] - run(f"{spec}{more}", 1)[1] for more in ("", ",hierarchical=on"))
            assert 0 < tall < 0.525 * flat


SHARDED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from hvd_compress.distributed import Compression

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("nodes", "within"))
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 1024, bias=False))
if sys.argv[1] == "tensor":
    parallelize_module(model, mesh["within"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    mesh = mesh["nodes"]
fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
if sys.argv[2] != "plain":
    Compression.parse(sys.argv[2]).register(model, gather="int8")
for step in range(int(sys.argv[3])):
    model(torch.randn(8, 1024)).sum().backward()
dist.destroy_process_group()
"""


@for_real
@pytest.mark.long
@pytest.mark.parametrize(
    ("inside", "formula"),
    [
        ("replicas", {"plain": 2.0, "qsgd:bits=4": 0.51, "topk:ratio=0.01": 0.06}),
        ("tensor", {"plain": 1.0 + 2.0, "qsgd:bits=4": (1.03 + 0.51) / 2}),
    ],
)
def test_fsdp_on_nodes_sends_the_bytes_of_the_formula(inside: str, formula: dict[str, float], tmp_path: Path) -> None:
    """A node sends as many bytes per parameter as its part takes, by the counters of its device.

    The other node gets all gradients of a replica. Of a part of the tensors, it gets one half of the parameters, once
    because the root is not resharded, and one half of the gradients; Gloo's own reduce-scatter is an allreduce.
    """
    (tmp_path / "job.py").write_text(SHARDED)
    with Cluster(2, "1gbit", ranks_per_host=2) as cluster:

        def sent(spec: str, steps: int) -> int:
            before = [one.sent for one in cluster.traffic()]
            command = [sys.executable, str(tmp_path / "job.py"), inside, spec, str(steps)]
            ended = cluster.launch(command, {"OMP_NUM_THREADS": "1"}, horovod=False)
            assert [one.code for one in ended] == [0] * 4, "\n".join(one.output for one in ended)
            return max(after.sent - first for after, first in zip(cluster.traffic(), before, strict=True))

        of_step = {spec: (sent(spec, 41) - sent(spec, 1)) / 40 for spec in formula}
    assert {spec: nbytes / (2 * 1024**2) for spec, nbytes in of_step.items()} == pytest.approx(formula, rel=0.03)
