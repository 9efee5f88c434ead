"""Rendezvous: the port and the store by which the processes of a launch find each other."""

from __future__ import annotations

import os
import re

import torch.distributed as dist


def choose_port() -> None:
    """Give a single process without torchrun a free port, so that a second run on this machine does not collide."""
    if os.environ.get("WORLD_SIZE", "1") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())


def use_fresh_store_after_restart() -> None:
    """Make restarted processes use a fresh rendezvous store.

    torch's launcher offers them the store of the previous attempt, where they would find the addresses of dead
    processes, and hang. Process 0 opens a new store, and publishes its port in the old one.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not is_launchers_store():
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    old = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    if os.environ["RANK"] == "0":
        old.set(f"port of attempt {attempt}", str(_free_port()))
    os.environ["MASTER_PORT"] = old.get(f"port of attempt {attempt}").decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(False)


def is_launchers_store() -> bool:
    """Return whether processes use the launcher's rendezvous store instead of one that process 0 opens."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def explain_failure(error: str) -> str:
    """Error line for a rendezvous that failed: processes are missing, nothing answers, or another process owns the port."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if missing := re.search(r"(\d+)/(\d+) clients joined", error):
        return (
            f"all {missing[2]} processes must come to the rendezvous at {address}, got {missing[1]}; start the launch on every "
            "machine, and check that the firewall lets them reach this port"
        )
    if "EADDRINUSE" not in error and "in use" not in error:
        return (
            f"the rendezvous at {address} must be reachable, got no answer; check main_process_ip, main_process_port and "
            "the firewall, and that machine 0 was started"
        )
    owner = _owner_of_port(os.environ.get("MASTER_PORT", ""))
    return f"the rendezvous at {address} must be free, got: it is in use{owner}; choose another --main_process_port (0 picks one)"


def _owner_of_port(port: str) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and str(connection.laddr.port) == port and connection.status == psutil.CONN_LISTEN:
                return f" by process {connection.pid}" if connection.pid else ""
    except psutil.Error:
        pass  # no permission to see it
    return ""
