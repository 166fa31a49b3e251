"""Several processes for one run: accelerate starts them, here or on several machines; each runs the same command.

The launcher waits, passes signals on to the processes and says what they ended with. A process finds its place in the
variables that accelerate (or torchrun) sets. Each has a watch: when another one dies or fails, it ends within seconds,
whatever collective it waits in; when its launcher is gone, it saves and ends.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagecli.errors import RunStopped, UserError

if TYPE_CHECKING:
    from sagecli.config_parallel import ParallelConfig
    from sagecli.engine.processes import Processes

FOLDER, COUNT, LAUNCHER = "SAGE_LAUNCH_FOLDER", "SAGE_PROCESSES", "SAGE_LAUNCHER"
FAILED, DONE = "sage/failed", "sage/done"
LOST = "this process lost contact with another one, which ended"
LONGEST_WAIT = timedelta(hours=24)
"""Of a collective: processes wait for each other's rollouts and rewards; who dies is noticed by the watch."""


@dataclass(frozen=True)
class Launch:
    """How many processes, and on which machines."""

    processes: int
    """Over all machines."""
    machines: int = 1
    machine_rank: int = 0
    main_ip: str | None = None
    main_port: int | None = None

    def __post_init__(self) -> None:
        if self.processes % self.machines:
            raise UserError(f"{self.processes} processes do not fit {self.machines} machines: each has as many")
        if self.machine_rank >= self.machines:
            raise UserError(
                f"--machine-rank {self.machine_rank}: of {self.machines} machines the last is {self.machines - 1}"
            )
        if self.machines > 1 and (self.main_ip is None or self.main_port is None):
            raise UserError("several machines need --main-process-ip and --main-process-port, the same on each")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """accelerate's, that runs `sage ARGUMENTS` in every process of this machine."""
        options = {
            "--num_processes": self.processes,
            "--num_machines": self.machines,
            "--machine_rank": self.machine_rank,
            "--main_process_ip": self.main_ip or "127.0.0.1",
            "--main_process_port": self.main_port or _free_port(),
            "--mixed_precision": "no",
            "--dynamo_backend": "no",
        }
        listed = [text for option, value in options.items() for text in (option, str(value))]
        return [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            *listed,
            "--module",
            "sagecli.cli",
            *arguments,
        ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def place() -> tuple[int, int] | None:
    """(rank, number of processes) where a launcher started this process; None where it is alone."""
    count = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    return (int(os.environ["RANK"]), count) if count > 1 else None


def launch(request: Launch) -> int:
    """Run this command in several processes, which find their place in the environment; returns its exit code.

    UserError for GPUs that are not there.
    """
    import torch

    here = request.processes // request.machines
    gpus = torch.cuda.device_count()
    if gpus and here > gpus:
        raise UserError(f"{here} processes on this machine need as many GPUs; it has {gpus}")
    environment = os.environ | {"PYTHONSAFEPATH": "1", COUNT: str(request.processes), LAUNCHER: str(os.getpid())}
    if not gpus:
        environment |= {"ACCELERATE_USE_CPU": "1"}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // here)))
    with tempfile.TemporaryDirectory(prefix="sage-") as folder:
        environment[FOLDER] = folder
        process = subprocess.Popen(
            request.command(sys.argv[1:]),
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
        )
        with _passed_on(process, Path(folder)) as received:
            report = _relay(process)
            process.wait()
        if received and not any(Path(folder).glob("*.json")):  # none of them had begun, or could still end by itself
            return 128 + received[0]
        return _outcome(Path(folder), process.returncode, report)


@contextmanager
def _passed_on(process: "subprocess.Popen[str]", folder: Path) -> Iterator[list[int]]:
    """Signals go to every process of the run; yields those received.

    One that comes before the processes have begun, or two seconds after the first, ends them at once.
    """
    received: list[int] = []
    first = 0.0

    def handle(signum: int, frame: Any) -> None:
        nonlocal first
        first = first or time.monotonic()
        received.append(signum)
        begun = list(folder.glob("*.pid"))
        if not begun or time.monotonic() - first > 2:
            os.killpg(process.pid, signal.SIGKILL)
        for file in begun:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(int(file.read_text()), signum)

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _relay(process: "subprocess.Popen[str]") -> str:
    """Show what the processes write to stderr, without the launcher's own report, which is returned."""
    report = ""
    for line in process.stderr or ():
        if report or re.match(r"[EWI]\d{4} .*torch/distributed/", line):
            report += line if line.startswith("E") or report else ""
        else:
            sys.stderr.write(line)
            sys.stderr.flush()
    return report


def _outcome(folder: Path, code: int, report: str) -> int:
    """The run's exit code; says, once, what its processes ended with."""
    ends = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    sentences = dict.fromkeys(end["sentence"] for end in ends if end["sentence"] not in ("", LOST))
    if sentences:
        raise _error_of(max(end["code"] for end in ends if end["sentence"] in sentences), "\n".join(sentences))
    killed = re.search(r"rank\s*: (\d+) [^\n]*\n\s*exitcode\s*: -(\d+)", report)
    if killed:
        raise RunStopped(
            f"process {killed[1]} was ended by {signal.Signals(int(killed[2])).name}, and the others with it; the run "
            "is saved up to its last checkpoint: go on with sage train --resume RUN"
        )
    if any(end["sentence"] == LOST for end in ends):
        raise RunStopped(LOST)
    return max([code, *(int(end["code"]) for end in ends)])


def _error_of(code: int, sentence: str) -> Exception:
    return UserError(sentence) if code == 2 else RunStopped(sentence)


def join(parallel: "ParallelConfig") -> "Processes":
    """This process's place among those of the run; waits until all are there. UserError where they do not fit."""
    from sagecli.engine.processes import ALONE, Processes

    found = place()
    started, wanted = found[1] if found else 1, os.environ.get(COUNT)
    if wanted and int(wanted) != started:
        raise RunStopped(f"{wanted} processes were asked for and {started} started")
    check_count(parallel, started)
    if found is None:
        return ALONE
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, count = found
    if FOLDER in os.environ:
        (Path(os.environ[FOLDER]) / f"{rank}.pid").write_text(str(os.getpid()))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=LONGEST_WAIT)
    sequence = parallel.sequence
    processes = Processes(rank // sequence, count // sequence, sequence, rank % sequence)
    neighbours = [
        pid for host, pid in processes.gather_all((socket.gethostname(), os.getpid())) if host == socket.gethostname()
    ]
    threading.Thread(target=_watch, args=(neighbours,), daemon=True).start()
    return processes


def check_count(parallel: "ParallelConfig", count: int) -> None:
    """UserError for a number of processes that the [parallel] table does not allow."""
    if count % parallel.sequence or (parallel.data and count != parallel.data * parallel.sequence):
        wanted = f"{parallel.data} x {parallel.sequence}" if parallel.data else f"a multiple of {parallel.sequence}"
        raise UserError(
            f"--num-processes {count}: with parallel.data = {parallel.data} and parallel.sequence = "
            f"{parallel.sequence} it takes {wanted}"
        )


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _watch(neighbours: list[int]) -> None:
    """End this process, soon, when another of the run has; ask it to save and end when its launcher has."""
    store = _store().clone()
    launcher = int(os.environ.get(LAUNCHER, "0"))
    while True:
        time.sleep(0.5)
        if _is_done(store):
            return
        try:
            failed = store.check([FAILED])
        except RuntimeError:  # the machine that holds the store is gone
            failed = True
        if failed or not all(map(_lives, neighbours)):
            time.sleep(2)  # it may be about to say why itself, or be the first of those that are done
            if not _is_done(store):
                os._exit(1)
        if launcher and not _lives(launcher):
            launcher = 0
            os.kill(os.getpid(), signal.SIGTERM)


def _is_done(store: Any) -> bool:
    try:
        return bool(store.check([DONE]))
    except RuntimeError:
        return False


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error) or "Connection" in str(error)


def leave(code: int, sentence: str) -> None:
    """End a process that a launcher started: tell it and the others how."""
    import torch.distributed as dist

    rank = os.environ["RANK"]
    if dist.is_initialized():
        if not sentence:
            dist.barrier()
        _store().set(FAILED if sentence else DONE, "1")
    if FOLDER in os.environ:
        end = json.dumps({"code": code, "sentence": sentence})
        (Path(os.environ[FOLDER]) / f"{rank}.json").write_text(end, encoding="utf-8")
        code = code if sentence else 0  # the launcher would end the others for anything else
    elif sentence:
        print(f"error: {sentence} (process {rank})", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
