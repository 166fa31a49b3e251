"""A reward of another package, installed in a folder for PYTHONPATH."""

from pathlib import Path


def install_reward(folder: Path, name: str, class_name: str, source: str) -> None:
    """Write the module and what pip would write of its entry point."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sagecli.rewards]\n{name} = {name}:{class_name}\n")
