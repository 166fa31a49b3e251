"""Folders of models: given as they are, or found by hub id in the Hugging Face cache. The network is never asked."""

import re
from pathlib import Path

from sagecli.errors import UserError


def is_hub_id(path: str) -> bool:
    """Whether it is spelled owner/name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None


def local_folder(path: str, key: str, also: str = "") -> Path:
    """The folder that a setting `key` names by path or hub id; UserError where there is none here.

    also: what else the setting takes, for the sentence.
    """
    folder = Path(path).expanduser()
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
