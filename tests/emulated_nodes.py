"""Training through several launcher agents on one host, as over several nodes: is it still one process's training?

    python tests/emulated_nodes.py [--device cpu] [--nodes 2] [--ranks 1] [--steps 50]

Each node is an agent of its own (`torch.distributed.run`) with its own ranks, which meet at the first node's port;
between GPUs neither peer access nor shared memory is used, so that everything goes over sockets. What runs is the
multi-node code: rendezvous, global and local ranks, sockets. What it takes says nothing of nodes: it is printed as
EMULATED, is no journal, and so is in no table of scaling. Run by `make emulated-nodes`. Ends with exit code 1
where a rank failed, or the loss of a step is not that of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kernelmark.suite.measure.ranks import LOOPBACK, NO_MULTICAST

WAYS = ("ddp", "fsdp2")
NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""Between GPUs of one host only sockets are left."""
DEADLINE_S = 300.0
BOUND = {"cpu": 1e-3, "cuda": 2e-2}
"""How far the loss of a step may be from one process's, relative: in fp32, and in bf16."""


def command(nodes: int, node: int, ranks: int, port: int, *arguments: object) -> list[str]:
    """An agent's: of so many nodes this one, with so many ranks."""
    launcher = [
        f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={ranks}", "--max-restarts=0",
        "--master-addr=127.0.0.1", f"--master-port={port}",
    ]  # fmt: skip
    return [sys.executable, "-m", "torch.distributed.run", *launcher, __file__, "rank", *map(str, arguments)]


def environment(device: str, node: int, ranks: int) -> dict[str, str]:
    """An agent's; a node's GPUs are no other's."""
    found = {**os.environ, **NO_MULTICAST, **LOOPBACK, **NO_PEERS, "OMP_NUM_THREADS": "1"}
    if device == "cuda":
        found["CUDA_VISIBLE_DEVICES"] = ",".join(str(node * ranks + i) for i in range(ranks))
    return found


def emulated(device: str, nodes: int, ranks: int, steps: int) -> tuple[dict[str, Any], list[str]]:
    """What rank 0 found of each way, and what went wrong. No agent and no rank is left."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        agents = [
            subprocess.Popen(
                command(nodes, node, ranks, port, out, device, steps),
                env=environment(device, node, ranks),
                start_new_session=True,
            )
            for node in range(nodes)
        ]
        end = time.monotonic() + DEADLINE_S
        wrong = []
        try:
            for node, agent in enumerate(agents):
                code = agent.wait(max(0.1, end - time.monotonic()))
                wrong += [f"the agent of node {node} ended with exit code {code}"] if code else []
        except subprocess.TimeoutExpired:
            wrong.append(f"not finished within {DEADLINE_S:g} s")
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
                    agent.wait()
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found, wrong + judged(found, device, nodes * ranks)


def judged(found: dict[str, Any], device: str, world: int) -> list[str]:
    """What is wrong with what rank 0 found: `world`, and by way the losses of steps beside one process's."""
    if not found:
        return ["rank 0 said nothing"]
    wrong = [] if found["world"] == world else [f"{found['world']} ranks met, and not {world}"]
    for way, x in found["ways"].items():
        off = max(abs(a - b) / abs(b) for a, b in zip(x["losses"], x["alone"], strict=True))
        if not off <= BOUND[device]:
            wrong.append(f"{way}: the loss of a step is off by {off:.2g}, allowed {BOUND[device]:g}")
    return wrong


def rank(out: str, device: str, steps: int) -> None:
    """One rank's program: the steps of every way, and in rank 0 those of one process."""
    import torch
    import torch.distributed as dist
    from kernelmark.suite.system import Assembly, System
    from kernelmark.suite.workloads import _expected as answer
    from kernelmark.suite.workloads import train

    cuda = device == "cuda"
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(here)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    world = dist.get_world_size()

    def trained(way: str, gpus: int) -> tuple[list[float], float]:
        axes = {"B": 1, "S": 32, "A": world // gpus, "gpus": gpus}
        dtype = "bf16" if cuda else "fp32"
        case = train.WORKLOAD.case(axes, dtype, "program", model="llama-tiny", parallel=way)
        trainer = train.assemble(case, Assembly(System("torch"), train.catalog()))
        whole = train.read(train.WORKLOAD.whole(case))
        trainer.load(answer.initial(whole, 1, here))
        batches = answer.Batches(whole, 1, here)
        begin = time.monotonic()
        losses = [trainer.step(*map(trainer.parallel.share, batches.draw(i))).float() for i in range(steps)]
        found = torch.stack(losses)
        if gpus > 1:
            dist.all_reduce(found)
        return (found / gpus).tolist(), 1e3 * (time.monotonic() - begin) / steps

    ways = {way: trained(way, world) for way in WAYS}
    if dist.get_rank() == 0:
        alone = trained("single", 1)[0]
        told = {way: {"losses": losses, "alone": alone, "ms": ms} for way, (losses, ms) in ways.items()}
        Path(out).write_text(json.dumps({"world": world, "ways": told}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    found, wrong = emulated(given.device, given.nodes, given.ranks, given.steps)
    what = "P2P and shared memory off" if given.device == "cuda" else "gloo"
    print(f"EMULATED: {given.nodes} nodes of {given.ranks} ranks on one host, {what}; no measure of scaling")
    for way, x in found.get("ways", {}).items():
        off = max(abs(a - b) / abs(b) for a, b in zip(x["losses"], x["alone"], strict=True))
        print(f"{way}: {len(x['losses'])} steps of {x['ms']:.3g} ms, loss off by at most {off:.2g}")
    print("\n".join(wrong) or "as one process")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(main())
