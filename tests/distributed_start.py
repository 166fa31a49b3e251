"""Starts a script in several processes, as a launcher would, for several test files."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def start(script: Path, count: int, *arguments: str) -> None:
    """Run it in `count` processes, and wait; all must end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)} for rank in range(count)]
    command = [sys.executable, str(script), *arguments]
    started = [subprocess.Popen(command, env=common | (place if count > 1 else {})) for place in places]
    assert [process.wait(timeout=900) for process in started] == [0] * count
