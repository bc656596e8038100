"""The benchmark of one long sequence: memory follows the block, not the length."""

import json

import bench_long


def test_memory_follows_the_block(tmp_path, capsys):
    files = {"--json": tmp_path / "l.json", "--plot": tmp_path / "l.png"}
    arguments = [str(word) for pair in files.items() for word in pair]
    arguments += ["--model", "tiny", "--lengths", "1024,2048,4096"]
    bench_long.main([*arguments, "--max-dense", "2048", "--max-repeated", "1024"])

    points = json.loads((tmp_path / "l.json").read_text())["points"]
    peaks = {(p["variant"], p["tokens"]): p["peak_bytes"] for p in points}
    assert all(p["seconds"] > 0 for p in points)
    ours = "dta@512/0"
    assert peaks[ours, 2048] < peaks["dense_ckpt", 2048] < peaks["dense", 2048]
    assert peaks["dense", 2048] > 1.7 * peaks["dense", 1024]
    # what grows is keys and values of the path alone, in fp32, and their gradients
    per_token = 2 * 2 * 2 * 2 * 16 * 4
    grown = peaks[ours, 4096] - peaks[ours, 2048]
    assert per_token * 2048 <= grown <= 4 * per_token * 2048
    assert ("dense", 4096) not in peaks

    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    assert "| 4,096 | – | – |" in capsys.readouterr().out
