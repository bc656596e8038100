"""Lines of a JSON Lines file, and the errors that name them."""

import json

import pytest

from areal_dta.tasks.jsonl import read_jsonl


def read(path, content):
    path.write_bytes(content)
    return list(read_jsonl(path, "expected numbers"))


def test_blank_lines_count_and_other_separators_do_not(tmp_path):
    text = "one\u2028line\x85only"  # str.splitlines would cut it
    content = json.dumps({"a": text}, ensure_ascii=False).encode() + b'\r\n\n{"a": 2}'
    rows = read(tmp_path / "a.jsonl", content)
    assert rows == [(1, {"a": text}), (3, {"a": 2})]


def test_a_byte_order_mark(tmp_path):
    assert read(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n') == [(1, {"a": 1})]
    assert read(tmp_path / "b.jsonl", b"\xef\xbb\xbf\n{}\n") == [(2, {})]


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b'{"a": ', r"not JSON \(.*\); expected numbers\."),
        (b"[1]", r"got a JSON list; expected numbers\."),
        (b'"\xff"', r"not UTF-8 text; expected numbers\."),
        (b"[" * 100_000, r"not JSON \(.*recursion.*\); expected numbers\."),
        (b'{"a": ' + b"1" * 5000 + b"}", r"not JSON \(.*digits.*\); expected numbers"),
        (b'{"a": ["\\ud83d"]}', r"half of a \\u surrogate pair; expected numbers\."),
    ],
)
def test_file_and_line_are_named(tmp_path, line, complaint):
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {complaint}"):
        read(tmp_path / "a.jsonl", b"{}\n" + line)


def test_a_surrogate_pair_is_a_character(tmp_path):
    assert read(tmp_path / "a.jsonl", b'{"a": "\\ud83d\\ude00"}') == [
        (1, {"a": "\U0001f600"})
    ]


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*nowhere: No such file"):
        next(read_jsonl(tmp_path / "nowhere", ""))
