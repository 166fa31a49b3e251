"""VideoAlign's prompt template: part of the trained model, read from its own files, never executed, not kept here.

The text lies as prompt_template.txt in the checkpoint's folder, or in prompt_template.py of a VideoAlign checkout, or
in a file: either the text itself or that Python file, whose string is taken from its syntax tree.
"""

import ast
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from sagecli.errors import UserError
from sagecli.prompts import read_text

TOKENS = {"VQ": "<|VQ_reward|>", "MQ": "<|MQ_reward|>", "TA": "<|TA_reward|>"}
"""Axis -> the token at which its score is read; in the order of their numbers."""
PROMPT = "{text_prompt}"
KNOWN_SHA256 = "8fb42f91fd7440a1c9a377e78f36d67da6132eb348f402eecbeb57e41f138ae9"
SOURCE = (
    "https://raw.githubusercontent.com/KwaiVGI/VideoAlign/219ab9db64c045e5181a2202d11f686439351292/prompt_template.py"
)


@dataclass(frozen=True)
class Template:
    """A prompt template."""

    text: str
    """With PROMPT once and each of TOKENS once."""
    sha256: str
    """Of the file it was read from."""


def read_template(path: str | None, checkpoint: Path) -> Template:
    """The template at path (a file, or a checkout), else that of the checkpoint's folder; UserError without one."""
    file = checkpoint / "prompt_template.txt" if path is None else Path(os.path.expanduser(path))
    if file.is_dir():
        file = file / "prompt_template.py"
    if not file.is_file():
        raise UserError(
            f"VideoAlign's prompt template is missing: {file} is no file; get it by\n"
            f"      curl -L -o {checkpoint / 'prompt_template.txt'} \\\n        {SOURCE}"
        )
    text = read_text(file)
    found = [part for part in _strings(text) or [text] if _is_template(part)]
    if len(found) != 1:
        needs = ", ".join([PROMPT, *TOKENS.values()])
        raise UserError(f"{file}: {len(found) or 'no'} text that has each of {needs} once; it takes exactly one")
    return Template(found[0], hashlib.sha256(file.read_bytes()).hexdigest())


def _is_template(text: str) -> bool:
    return all(text.count(part) == 1 for part in (PROMPT, *TOKENS.values()))


def _strings(source: str) -> list[str]:
    """Every string constant of Python source; none where it is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
