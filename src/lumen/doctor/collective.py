"""Two ranks add two vectors, within a time limit that names the rank that is missing.

The first collective of a run is where a wrong interface, a firewalled port or a translating IOMMU shows, as a hang.
Here each rank is a forked process with a deadline.  With two or more GPUs the ranks use them and NCCL/RCCL; otherwise
gloo on the CPU, which is what several CPU processes use.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

SIZE = 1 << 18
"""Elements of the vector: 1 MiB of fp32."""

RANKS = 2


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _rank(rank: int, port: int, seconds: float, pipe: Connection) -> None:
    try:
        import torch
        import torch.distributed as dist

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        backend = "nccl" if gpus >= RANKS else "gloo"
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timedelta(seconds=seconds))
        dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=seconds))
        vector = torch.arange(SIZE, dtype=torch.float32, device=device) % 1024 + rank
        started = time.perf_counter()
        dist.all_reduce(vector)
        if backend == "nccl":
            torch.cuda.synchronize()
        took = time.perf_counter() - started
        expected = 2 * (torch.arange(SIZE, dtype=torch.float32) % 1024) + 1
        pipe.send({"rank": rank, "backend": backend, "exact": torch.equal(vector.cpu(), expected), "seconds": took})
        dist.destroy_process_group()
    except Exception as error:
        pipe.send(
            {"rank": rank, "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        )
    finally:
        pipe.close()


class Collective:
    """Two ranks at work: `Collective(seconds)` starts them, `result()` waits until the deadline.

    Start it before anything touches a GPU or starts threads in this process: the ranks are forks of it.
    """

    def __init__(self, seconds: float):
        self.deadline, self.seconds = time.monotonic() + seconds, seconds
        context, port = mp.get_context("fork"), _free_port()
        self.processes, self.pipes = [], []
        for rank in range(RANKS):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, port, seconds, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def result(self) -> dict[str, Any]:
        """{backend, exact, seconds, errors: rank → text, missing: ranks that did not answer in time}."""
        answers: list[dict[str, Any]] = []
        missing: list[int] = []
        for rank, pipe in enumerate(self.pipes):
            left = max(0.0, self.deadline - time.monotonic())
            try:
                if pipe.poll(left):
                    answers.append(pipe.recv())
                    continue
            except EOFError:
                answers.append({"rank": rank, "error": "the process died"})
                continue
            missing.append(rank)
        for process in self.processes:
            process.join(timeout=0.2)
            if process.is_alive():
                process.kill()
                process.join(timeout=1)
        good = [answer for answer in answers if "error" not in answer]
        return {
            "backend": good[0]["backend"] if good else "",
            "exact": len(good) == RANKS and all(answer["exact"] for answer in good),
            "seconds": max((answer["seconds"] for answer in good), default=0.0),
            "errors": {answer["rank"]: answer["error"] for answer in answers if "error" in answer},
            "missing": missing,
            "limit": self.seconds,
        }
