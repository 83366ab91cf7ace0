"""The rendezvous of ranks on one machine, which no other machine can reach: torch's own listens on all interfaces."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ADDRESS = "127.0.0.1"


def listen(port: int = 0) -> socket.socket:
    """Return a socket that listens on a port of the loopback interface; 0 for any free one. Raises OSError."""
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ADDRESS, port))
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def store(listening: socket.socket) -> TCPStore:
    """Serve a key-value store on a socket, so that no other process can take its port meanwhile. The socket is used up."""
    from torch.distributed import TCPStore

    port = listening.getsockname()[1]
    served = listening.detach()
    return TCPStore(ADDRESS, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=served)


def variables() -> dict[str, str]:
    """Return the variables with which gloo connects the ranks there, too: the host's name may not resolve to an address."""
    name = "GLOO_SOCKET_IFNAME"
    return {name: os.environ.get(name, "lo")} if sys.platform == "linux" else {}
