import itertools
from collections import Counter
from pathlib import Path

import pytest

from sagecli.errors import UserError
from sagecli.prompts import Prompt, builtin_names, read_prompts
from sagecli.rewards.shapes import COLOURS, DIRECTIONS, SHAPES, SIZES, SPEEDS, Caption, parse

ATTRIBUTES = {"size": SIZES, "colour": COLOURS, "shape": SHAPES, "direction": DIRECTIONS, "speed": SPEEDS}


def prompt_file(folder: Path, content: str | bytes, name: str = "p.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("name", ["p.txt", "p", "p.prompts"])
def test_one_prompt_a_line(tmp_path: Path, name: str) -> None:
    text = "# a comment\n\n  a red kite \nthe sea # at night\n\t\n  # another\nlast, without a line end"
    expected = [Prompt("a red kite"), Prompt("the sea # at night"), Prompt("last, without a line end")]
    path = prompt_file(tmp_path, text, name)
    assert read_prompts(path) == read_prompts(str(path)) == expected


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_byte_order_mark_and_line_ends_change_nothing(tmp_path: Path, end: str, mark: bytes) -> None:
    for name, lines, expected in (
        ("p.txt", ["ein Haus über dem Fluß", "海边的猫"], [Prompt("ein Haus über dem Fluß"), Prompt("海边的猫")]),
        ("p.csv", ["prompt,seed", '"a cat, asleep",3', "a dog,"], [Prompt("a cat, asleep", 3), Prompt("a dog")]),
        ("p.jsonl", ['{"prompt": "a"}', '{"prompt": "b", "seed": 0}'], [Prompt("a"), Prompt("b", 0)]),
    ):
        assert read_prompts(prompt_file(tmp_path, mark + end.join(lines).encode(), name)) == expected


def test_unusual_line_separators_stay_inside_a_prompt(tmp_path: Path) -> None:
    assert read_prompts(prompt_file(tmp_path, "a\u2028b\u0085c\n")) == [Prompt("a\u2028b\u0085c")]


def test_other_columns_and_keys_are_left_alone(tmp_path: Path) -> None:
    assert read_prompts(prompt_file(tmp_path, "id, prompt ,seed\n7,a cat,\n\n8,a dog, 12 \n", "p.CSV")) == [
        Prompt("a cat"),
        Prompt("a dog", 12),
    ]
    assert read_prompts(prompt_file(tmp_path, '{"id": 7, "prompt": " a cat ", "seed": null}\n\n', "p.jsonl")) == [
        Prompt("a cat")
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", "", "no prompt in this file"),
        ("p.txt", "# only\n\n# comments\n", "no prompt in this file"),
        ("p.csv", "prompt,seed\n", "no prompt in this file"),
        ("p.csv", "", "no column 'prompt'"),
        ("p.csv", "text;seed\na;1\n", "no column 'prompt'; the columns of its first line are ['text;seed']"),
        ("p.csv", "prompt,seed\na cat, asleep,3\n", "line 2: 3 cells under 2 columns; put a prompt with commas in"),
        ("p.csv", "prompt,seed\nfine,1\na cat,3.5\n", "line 3: 'seed' is \"3.5\"; it takes a whole number from 0"),
        ("p.csv", "prompt\n  \n", "line 2: 'prompt' is \"  \"; it takes a text that is not empty"),
        ("p.csv", 'prompt\n"never closed\n', "line 2: not CSV (unexpected end of data)"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n', "line 2: not JSON (Expecting ',' delimiter"),
        ("p.jsonl", '\n"a cat"\n', "line 2: not an object such as"),
        ("p.jsonl", '{"promt": "a"}', "line 1: no key 'prompt'; the keys are ['promt']; did you mean 'promt'?"),
        ("p.jsonl", '{"prompt": 3}', "line 1: 'prompt' is 3; it takes a text that is not empty"),
        ("p.jsonl", '{"prompt": ""}', "line 1: 'prompt' is \"\"; it takes a text that is not empty"),
        ("p.jsonl", '{"prompt": "a", "seed": true}', "line 1: 'seed' is true; it takes a whole number from 0"),
        ("p.jsonl", '{"prompt": "a", "seed": -1}', "line 1: 'seed' is -1; it takes a whole number from 0"),
        ("p.jsonl", '{"prompt": "a", "seed": 9223372036854775808}', "'seed' is 9223372036854775808; it takes"),
        ("p.txt", "über".encode("latin-1"), "not UTF-8 text (byte 0); save it as UTF-8"),
        ("p.txt", "a cat".encode("utf-16"), "not UTF-8 text"),
        ("p.txt", b"PK\x03\x04\x00\x00", "a binary file, not text"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_it(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    path = prompt_file(tmp_path, content, name)
    with pytest.raises(UserError) as caught:
        read_prompts(path)
    sentence = str(caught.value)
    assert sentence.startswith(str(path))
    assert said in sentence
    assert "\n" not in sentence


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.txt: no such file"):
        read_prompts(tmp_path / "gone.txt")
    with pytest.raises(UserError, match="this is a folder"):
        read_prompts(tmp_path)


def test_unknown_packaged_file_names_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        read_prompts("builtin:shape-train")
    assert str(caught.value) == (
        "unknown prompt file builtin:shape-train; there are builtin:shapes-heldout, builtin:shapes-train, "
        "builtin:videos-heldout, builtin:videos-train; did you mean 'shapes-train'?"
    )


def test_packaged_files_have_no_prompt_twice() -> None:
    assert builtin_names() == ["shapes-heldout", "shapes-train", "videos-heldout", "videos-train"]
    for kind, counts in (("shapes", (240, 48)), ("videos", (48, 12))):
        texts = [[prompt.text for prompt in read_prompts(f"builtin:{kind}-{part}")] for part in ("train", "heldout")]
        assert tuple(map(len, texts)) == counts
        assert len(set(texts[0] + texts[1])) == sum(counts)


def test_shapes_are_the_whole_grammar_and_held_out_is_balanced() -> None:
    held_out = [parse(prompt.text) for prompt in read_prompts("builtin:shapes-heldout")]
    train = [parse(prompt.text) for prompt in read_prompts("builtin:shapes-train")]
    grammar = {
        Caption(**dict(zip(ATTRIBUTES, words, strict=True))) for words in itertools.product(*ATTRIBUTES.values())
    }
    assert set(held_out) | set(train) == grammar
    for one, other in itertools.combinations(ATTRIBUTES, 2):
        cells = Counter((getattr(caption, one), getattr(caption, other)) for caption in held_out)
        even = len(held_out) / (len(ATTRIBUTES[one]) * len(ATTRIBUTES[other]))
        assert len(cells) == len(ATTRIBUTES[one]) * len(ATTRIBUTES[other])
        assert all(abs(count - even) < 1 for count in cells.values())
    for name, words in ATTRIBUTES.items():
        assert set(Counter(getattr(caption, name) for caption in held_out).values()) == {len(held_out) // len(words)}
    assert {caption.colour for caption in held_out[:6]} == set(COLOURS)
