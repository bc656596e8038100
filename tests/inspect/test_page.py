"""The HTML page: complete in itself, nothing in a text becomes markup, and it works in
a browser (skipped without Chromium)."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_dta.inspect.analysis import analyse
from areal_dta.inspect.corpus import Corpus, Record
from areal_dta.inspect.models import model_sizes
from areal_dta.inspect.page import MAX_NODES, page
from areal_dta.inspect.prediction import Budgets
from areal_dta.inspect.rollouts.text import TextTokenizer, load_tokenizer

EVIL = (
    "</script><script>window.hacked=1</script><img src=x onerror=hacked=1>&amp;\u2028"
)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer()


def tree_page(tokenizer: TextTokenizer, num_nodes: int) -> str:
    """Return the page of about ``num_nodes`` nodes, with a date that costs sharing."""
    rng = np.random.default_rng(0)
    words = [tokenizer.encode(f" word{i}") for i in range(500)]

    def text(num: int) -> list[np.ndarray]:
        return [words[i] for i in rng.integers(0, 500, num)]

    rules = text(200)
    corpus, episodes = Corpus(), max(1, num_nodes // 26)
    for episode in range(episodes):
        head = f"<|im_start|>system\nToday is 2026-12-{1 + episode % 28:02d}. {EVIL}"
        history = [tokenizer.encode(head), *rules, *text(5)]
        for call in range(13):
            branch = [*history, *text(12)]
            tokens = np.concatenate(branch)
            spans = ((len(tokens) - 8, len(tokens)),)
            corpus.add(
                Record(tokens, f"line {episode}", spans, f"e{episode}", "", call)
            )
            history += text(6)
    model = model_sizes("20m", "float32", "cpu")
    source = {"files": {EVIL: "chat"}, "notes": [EVIL], "stopped": ""}
    analysis = analyse(corpus, model, Budgets(), 4, tokenizer, source)
    return page(analysis, EVIL)


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert match is not None
    return json.loads(match[1])


def test_page_is_complete_and_escaped(tokenizer: TextTokenizer) -> None:
    text = tree_page(tokenizer, 200)
    assert not re.search(r"https?://|(?:src|href)\s*=\s*[\"']|@import|url\(", text)
    assert text.count("<script") == 3 and text.count("</script>") == 3
    assert "default-src 'none'" in text
    data = data_of(text)
    assert data["title"] == EVIL
    assert any(EVIL[:60] in node["t"] for node in data["nodes"])
    assert all(node["p"] < i for i, node in enumerate(data["nodes"]))
    (finding,) = data["report"]["lost_sharing"]["findings"]
    assert finding["kind"] == "date or time"
    assert any("f" in node for node in data["nodes"])


def test_huge_tree_is_drawn_in_part(tokenizer: TextTokenizer) -> None:
    data = data_of(tree_page(tokenizer, 9000))
    nodes = data["nodes"]
    assert data["report"]["sharing"]["num_nodes"] > 2 * MAX_NODES
    assert len(nodes) <= 2 * MAX_NODES
    assert sum(n["n"] for n in nodes) == data["report"]["sharing"]["num_tree_tokens"]
    assert any("more branches" in n["t"] for n in nodes)


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


# Runs in the page: clicks a node, zooms, searches, changes the theme.
PROBE = """
<script>
function probe() {
  const out = {errors: window.errors, hacked: window.hacked || 0, nodes: N.length};
  const c = document.getElementById("tree"), r = c.getBoundingClientRect();
  const colours = () => {
    const g = c.getContext("2d"), d = g.getImageData(0, 0, c.width, c.height).data;
    const seen = new Set();
    for (let i = 0; i < d.length; i += 4 * 97)
      seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
    return seen.size;
  };
  out.colours = colours();
  const i = N.findIndex(n => n.e && !n.m), n = N[i], b = tree.view.box;
  const at = {clientX: r.left + ((n.x0 + n.x1) / 2 - b[0]) / (b[1] - b[0]) * r.width,
              clientY: r.top + ((n.y0 + n.y1) / 2 - b[2]) / (b[3] - b[2]) * r.height};
  for (const kind of ["pointerdown", "pointerup"])
    c.dispatchEvent(new PointerEvent(kind, at));
  out.picked = tree.picked; out.expected = i; out.text = n.t;
  out.shown = document.querySelector("#node pre").textContent;
  const before = [...tree.view.box];
  c.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: -200, cancelable: true}));
  out.zoomed = (tree.view.box[1] - tree.view.box[0]) / (before[1] - before[0]);
  document.getElementById("find").value = "Today";
  document.getElementById("find").oninput();
  out.found = tree.found.size;
  const background = () => getComputedStyle(document.body).backgroundColor;
  out.themes = [background()]; document.getElementById("theme").click();
  out.themes.push(background());
  out.rows = document.querySelectorAll("#ways tr").length;
  out.wide = document.documentElement.scrollWidth > innerWidth;
  out.outside = performance.getEntriesByType("resource").map(e => e.name);
  const box = document.createElement("pre"); box.id = "probe";
  box.textContent = JSON.stringify(out); document.body.append(box);
}
setTimeout(probe, 500);
</script></body>
"""


def run_in_browser(text: str, folder: Path, *options: str) -> dict[str, Any]:
    browser = chromium()
    if browser is None:
        pytest.skip("no Chromium (apt-get install chromium)")
    head = "<head><script>window.errors=[];onerror=m=>errors.push(String(m))</script>"
    text = text.replace("<head>", head, 1)
    before, _, after = text.rpartition("</body>")
    path = folder / "page.html"
    path.write_text(before + PROBE + after, encoding="utf-8")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000"]
    command += ["--window-size=1400,1200", *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:] + done.stdout[-500:]
    return json.loads(html.unescape(match[1]))


def test_page_works_in_a_browser(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    seen = run_in_browser(tree_page(tokenizer, 2000), tmp_path)
    assert seen["errors"] == []
    assert seen["hacked"] == 0
    assert 1900 < seen["nodes"] < 2200
    assert seen["colours"] > 10
    assert seen["picked"] == seen["expected"]
    assert seen["shown"] == seen["text"] != ""
    assert seen["zoomed"] < 0.95
    assert seen["found"] > 0
    assert len(set(seen["themes"])) == 2
    assert seen["rows"] == 5
    assert not seen["wide"]
    assert seen["outside"] == []
