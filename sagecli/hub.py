"""Folders of models: given as they are, or found by hub id in the Hugging Face cache. The network is never asked."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sagecli.errors import UserError


def is_hub_id(path: str) -> bool:
    """Whether it is spelled owner/name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None


def refuse_pointer(file: Path) -> None:
    """UserError for what Git leaves in place of a large file that was not fetched."""
    if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
        raise UserError(f"{file} is a Git LFS pointer, not the file itself; get it by `git lfs pull` or `hf download`")


def read_part(read: Callable[[Path], Any], folder: Path, what: str) -> Any:
    """read(folder), a library's loader of a model's small files; UserError where it cannot read them."""
    for file in folder.glob("*.json"):
        refuse_pointer(file)
    try:
        return read(folder)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{folder}: its {what} cannot be read ({reason}); get its files again") from None


def local_folder(path: str, key: str, also: str = "") -> Path:
    """The folder that a setting `key` names by path or hub id; UserError where there is none here.

    also: what else the setting takes, for the sentence.
    """
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return folder
    if not is_hub_id(path):
        raise UserError(f"{key} = {path!r} is no folder; it takes a folder, a hub id (owner/name){also}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{key} = {path!r} is neither a folder nor in the Hugging Face cache; get it by `hf download {path}`"
        ) from error
