"""`sage report`: what runs did, as one page with charts, videos and settings that works without a network."""

import os
from collections.abc import Sequence
from pathlib import Path

from sagecli.errors import UserError
from sagecli.report.collect import Group, read_run
from sagecli.report.page import write_page


def report_runs(paths: Sequence[Path], out: Path | None) -> Path:
    """Write the page of one run into its folder, or of several into `out`; returns report.html."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):  # told apart by what differs in their paths
        shared = os.path.commonpath([path.resolve().parent for path in paths])
        names = [str(path.resolve().relative_to(shared)) for path in paths]
    if len(set(names)) < len(names):
        raise UserError("a run is named twice; name each once")
    groups = [Group(name, [read_run(path, name)]) for path, name in zip(paths, names, strict=True)]
    if out is None and len(paths) > 1:
        raise UserError("name the folder of a page of several runs with --out")
    folder = out or paths[0]
    folder.mkdir(parents=True, exist_ok=True)
    return write_page(groups, folder, ", ".join(names))
