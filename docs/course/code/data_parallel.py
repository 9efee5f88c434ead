"""The six steps of DataParallel written by hand, with threads in place of GPUs, compared with DDP on as many processes.

python docs/course/code/data_parallel.py
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

WORKERS, ROWS, REPEATS = 2, 128, 150
SHAPES = {"60 layers, 32 wide": (60, 32), "3 layers, 768 wide": (3, 768)}
"""Many small layers spend their time in Python, few wide ones in matrix products, which run without Python's lock."""


def build(layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """The same model, optimizer and batch in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(ROWS, width)


def loss_of(outputs: Tensor, rows: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, rows.flip(1))


@cache
def shells(model: nn.Module) -> list[nn.Module]:
    """A module for each worker, built once: functional_call swaps the parameters of a module, which two threads must not share."""
    return [copy.deepcopy(model) for _ in range(WORKERS)]


def data_parallel_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, pool: ThreadPoolExecutor
) -> Tensor:
    """One step; every numbered line happens in every step."""
    parts = batch.chunk(WORKERS)  # 1 scatter: cut the batch, send the parts
    replicas = [  # 2 replicate: copy the model to every worker
        {name: parameter.clone() for name, parameter in model.named_parameters()} for _ in parts
    ]
    outputs = list(  # 3 parallel apply: one thread for each worker
        pool.map(lambda shell, replica, part: functional_call(shell, replica, (part,)), shells(model), replicas, parts)
    )
    gathered = torch.cat(outputs)  # 4 gather: all outputs on worker 0
    loss = loss_of(gathered, batch)  # 5 loss there; backward adds the gradients of all copies into worker 0's model
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # 6 update worker 0's model; the copies are thrown away
    return loss.detach()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """One step of one process; with DDP around the model, of each process on its own rows."""
    loss = loss_of(model(batch), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def fastest(step: Callable[[], Tensor]) -> float:
    """Seconds of the fastest step."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def work(rank: int, folder: str) -> None:
    """One DDP process: its share of the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    found = {}
    for name, shape in SHAPES.items():
        model, optimizer, batch = build(*shape)
        distributed, rows = DistributedDataParallel(model), batch.chunk(WORKERS)[rank]
        seconds = torch.tensor(fastest(partial(plain_step, distributed, optimizer, rows)))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        found[name] = float(seconds)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=WORKERS)
        by_processes = json.loads(Path(folder, "seconds.json").read_text())
    print(f"{'fastest step, the same rows':28}{'1 process':>13}{'2 threads':>13}{'2 processes':>13}")
    with ThreadPoolExecutor(WORKERS) as pool:
        for name, shape in SHAPES.items():
            seconds = (
                fastest(partial(plain_step, *build(*shape))),
                fastest(partial(data_parallel_step, *build(*shape), pool)),
                by_processes[name],
            )
            print(f"{name:28}" + "".join(f"{1000 * value:>10.1f} ms" for value in seconds))


if __name__ == "__main__":
    main()
