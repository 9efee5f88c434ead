"""Start two training processes without a launcher: set what a launcher sets, then spawn.

python docs/course/code/spawn.py --config docs/course/code/markov.yaml output_dir=runs/course/spawn
"""

import os
import socket
import sys

import torch.multiprocessing

NUM_PROCESSES = 2


def run(rank: int, port: int, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_PROCESSES)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(NUM_PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.path.insert(0, os.getcwd())
    import train

    sys.exit(train.main(arguments))


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (port, sys.argv[1:]), nprocs=NUM_PROCESSES)
