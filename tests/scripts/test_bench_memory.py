"""The memory benchmark counts what it says, and writes table, JSON and picture."""

import json

import bench_memory


def test_memory_follows_the_path_not_the_branches(tmp_path, capsys):
    arguments = ["--model", "tiny", "--trunk-tokens", "300", "--branch-tokens", "20"]
    files = {"--json": tmp_path / "m.json", "--plot": tmp_path / "m.png"}
    arguments += [str(word) for pair in files.items() for word in pair]
    bench_memory.main([*arguments, "--branches", "16,64", "--most-packed", "16"])

    peaks = json.loads((tmp_path / "m.json").read_text())["peaks"]
    few, many = peaks["dta@256/0"]
    assert many < 1.05 * few
    few, many = peaks["dense"]
    assert few == many
    assert peaks["packed"][0] > peaks["dta@256/0"][0] and peaks["packed"][1] is None
    retained = peaks["dta@256/all"]
    assert retained[0] > peaks["dta@256/0"][0]

    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "| dta, retain_tokens=0 |" in out and "| – |" in out
