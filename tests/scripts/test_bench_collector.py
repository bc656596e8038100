"""The collector benchmark's rows on a small batch; never its timings."""

import json

import bench_collector
from areal.infra.rpc import rtensor


def test_rows_and_json(tmp_path, capsys):
    out = tmp_path / "out.json"
    before = rtensor._backend
    options = ["--sequences", "16,32", "--tokens", "64", "--group", "8", "--ranks", "2"]
    try:
        args = [*options, "--large", "64", "--repeats", "1", "--json", str(out)]
        assert bench_collector.main(args) == 0
    finally:
        rtensor.set_backend(before)
    data = json.loads(out.read_text())
    names = [row["name"] for row in data["rows"]]
    assert names == ["shared prompt", "shared prompt", "dense row", "no sharing"]
    for row, num in zip(data["rows"], (16, 32, 16, 16), strict=True):
        assert (row["num_sequences"], row["num_tokens"]) == (num, 64 * num)
        # ids, logprobs, versions and loss mask of 4 bytes, a mask of 1, and the rewards
        assert row["fetched_bytes"] == 17 * 64 * num + 4 * num
        assert 0 < row["dispatched_bytes"]
    table = capsys.readouterr().out
    assert "| shared prompt | 32 |" in table and "8 threads" in table
