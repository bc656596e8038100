"""The radix tree of keys and values, by itself: contents, sharing, budget."""

import random

import numpy as np
import pytest
import torch

from areal_dta.rollout_server.prefix_cache import KV, KVShape, Node, PrefixCache

SHAPE = KVShape(2, 3, 4, 5, torch.float32, torch.device("cpu"))


def as_tokens(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int64)


def kv_of(tokens: np.ndarray, start: int, end: int) -> KV:
    """K/V that tell the whole path of a token: a hash of what leads to it."""
    codes, code = [], 7.0
    for token in tokens[:end].tolist():
        code = (code * 31 + token) % 65521
        codes.append(code)
    code_S = torch.tensor(codes[start:end], dtype=torch.float32)[:, None]
    layers = torch.arange(SHAPE.num_layers)[:, None, None, None]
    keys, values = (
        (code_S + layers).expand(-1, SHAPE.num_heads, -1, width).clone()
        for width in (SHAPE.key_dim, SHAPE.value_dim)
    )
    return KV(keys, values)


def fill(node: Node, count: int | None = None) -> None:
    """Compute tokens along a path, as the prefill does: from the root down."""
    path = node.path()
    tokens = np.concatenate([n.tokens for n in path]) if path else as_tokens("")
    for n in path:
        todo = n.num_tokens - n.num_filled
        todo = todo if count is None else min(todo, count)
        start = n.start + n.num_filled
        new = kv_of(tokens, start, start + todo)
        for held, part in zip(n.kv, new, strict=True):
            held[:, :, n.num_filled : n.num_filled + todo] = part
        n.num_filled += todo
        if count is not None:
            count -= todo


def check(cache: PrefixCache) -> int:
    """Check the invariants and all K/V; return the bytes that are held."""
    used = unused = num_bytes = 0
    for node in cache.nodes():
        path = node.path()
        assert [n.start for n in path] == [0, *[n.end for n in path[:-1]]]
        assert node.num_tokens
        assert node.parent.children[int(node.tokens[0])] is node
        assert node.num_users >= sum(c.num_users for c in node.children.values())
        assert 0 <= node.num_filled <= node.num_tokens == node.kv.keys.shape[2]
        tokens = np.concatenate([n.tokens for n in path])
        expected = kv_of(tokens, node.start, node.start + node.num_filled)
        for held, right in zip(node.kv, expected, strict=True):
            assert torch.equal(held[:, :, : node.num_filled], right)
        if node.num_users:
            used += node.num_tokens
        else:
            unused += node.num_tokens
            assert node.is_complete
        num_bytes += sum(x.untyped_storage().nbytes() for x in node.kv)
    assert (used, unused) == (cache.num_used_tokens, cache.num_unused_tokens)
    assert unused * SHAPE.bytes_per_token <= cache.max_unused_bytes
    assert num_bytes == (used + unused) * SHAPE.bytes_per_token
    return num_bytes


def use(cache: PrefixCache, text: str) -> int:
    """Acquire, fill and release; return how many tokens were there."""
    node, num_cached = cache.acquire(as_tokens(text))
    fill(node)
    cache.release(node)
    check(cache)
    return num_cached


def test_a_prefix_is_found_again_and_cut_where_paths_part() -> None:
    cache = PrefixCache(SHAPE, 10**6)
    found = [use(cache, text) for text in ("hello", "help", "hello you", "hel", "x")]
    assert found == [0, 3, 5, 3, 0]
    runs = sorted("".join(map(chr, n.tokens)) for n in cache.nodes())
    assert runs == [" you", "hel", "lo", "p", "x"]


def test_requests_share_what_is_still_being_computed() -> None:
    cache = PrefixCache(SHAPE, 10**6)
    first, _ = cache.acquire(as_tokens("abcdef"))
    fill(first, 2)
    second, num_cached = cache.acquire(as_tokens("abcdxy"))
    assert num_cached == 4
    assert [n.num_filled for n in second.path()] == [2, 0]
    fill(second)
    cache.release(first)  # nobody needs "ef" any more, and it was never computed
    check(cache)
    assert [n.num_tokens for n in second.path()] == [4, 2]
    cache.release(second)
    assert use(cache, "abcdef") == 4


def test_least_recently_used_leaves_go_first() -> None:
    cache = PrefixCache(SHAPE, 9 * SHAPE.bytes_per_token)
    for text in ("aaaX", "aaaY", "bbbb"):
        use(cache, text)
    assert use(cache, "aaaX") == 4  # is recent again
    use(cache, "c")  # 10 tokens: "Y" goes, its prefix is still needed
    assert use(cache, "aaaZ") == 3
    assert [use(cache, text) for text in ("aaaX", "bbbb")] == [4, 0]


def test_a_long_leaf_is_cut_before_it_goes() -> None:
    cache = PrefixCache(SHAPE, 100 * SHAPE.bytes_per_token)
    text = "".join(chr(i) for i in range(200))
    assert [use(cache, text[:99]), use(cache, "xyz")] == [0, 0]
    assert use(cache, text[:99]) == 75  # 2 too many: a quarter went
    assert [use(cache, text), use(cache, text[:100])] == [99, 99]


def test_without_a_budget_only_running_requests_share() -> None:
    cache = PrefixCache(SHAPE, 0)
    first, _ = cache.acquire(as_tokens("abc"))
    second, num_cached = cache.acquire(as_tokens("abd"))
    assert num_cached == 2
    cache.release(first)
    cache.release(second)
    assert check(cache) == 0


def test_answers_are_kept_within_the_budget() -> None:
    cache = PrefixCache(SHAPE, 8 * SHAPE.bytes_per_token)
    node, _ = cache.acquire(as_tokens("ab"))
    fill(node)
    for text in ("abcd", "abcd", "abcdefghijkl"):  # the last one is too long
        tokens = as_tokens(text)
        cache.insert(tokens, 2, lambda s, e, tokens=tokens: kv_of(tokens, s, e))
    cache.release(node)
    check(cache)
    assert use(cache, "abcdef") == 4
    # K/V from the middle of a path that is not there are of no use.
    cache.insert(as_tokens("xyz"), 2, lambda s, e: pytest.fail("copied"))
    assert use(cache, "xyz") == 0


def test_chains_are_joined_and_the_number_of_copies_is_bounded() -> None:
    cache = PrefixCache(SHAPE, 10**9)
    history, num_copied = "", 0
    for _ in range(60):
        history += "some more text of this history "
        node, _ = cache.acquire(as_tokens(history))
        fill(node)
        before = node.num_tokens
        cache.join_chain(node)
        num_copied += node.num_tokens if node.num_tokens > before else 0
        assert len(node.path()) < 8
        cache.release(node)
    check(cache)
    assert num_copied < 8 * len(history)


def play(num_requests: int, max_unused_tokens: int, seed: int) -> None:
    """Random requests of a few families, in any order, some given up half-way."""
    rng = random.Random(seed)
    budget = max_unused_tokens * SHAPE.bytes_per_token
    cache = PrefixCache(SHAPE, budget)
    open_paths: list[tuple[Node, np.ndarray]] = []
    for i in range(num_requests):
        family = rng.randrange(4)
        size = rng.choice([0, 1, 5, 40])
        tokens = np.array(
            [family] * rng.randrange(9) + [rng.randrange(3) for _ in range(size)],
            np.int64,
        )
        expected = len(tokens) - _num_used(cache, tokens)
        before = cache.num_used_tokens
        assert cache.num_new_tokens(tokens) == expected
        node, num_cached = cache.acquire(tokens)
        assert node.end == len(tokens) and num_cached <= len(tokens)
        assert cache.num_used_tokens == before + expected
        open_paths.append((node, tokens))
        for _ in range(rng.randrange(3)):
            if not open_paths:
                break
            node, tokens = open_paths.pop(rng.randrange(len(open_paths)))
            fill(node, rng.choice([None, None, 0, 3]))
            if all(n.is_complete for n in node.path()):
                cache.join_chain(node)
                answer = [rng.randrange(3) for _ in range(rng.randrange(6))]
                whole = np.concatenate([tokens, np.array(answer, np.int64)])
                cache.insert(
                    whole,
                    len(tokens),
                    lambda s, e, whole=whole: kv_of(whole, s, e),
                )
            cache.release(node)
        if i % 10 == 0:
            num_bytes = check(cache)
            used = cache.num_used_tokens * SHAPE.bytes_per_token
            assert num_bytes - used <= budget
        if rng.random() < 0.01:
            while open_paths:
                cache.release(open_paths.pop()[0])
            cache.clear()
            assert check(cache) == 0
    while open_paths:
        cache.release(open_paths.pop()[0])
    assert check(cache) <= budget


def _num_used(cache: PrefixCache, tokens: np.ndarray) -> int:
    """Tokens of this path that requests use, found without the cache's own walk."""
    best = 0
    for node in cache.nodes():
        if node.num_users and node.start <= len(tokens):
            path = np.concatenate([n.tokens for n in node.path()])
            size = min(len(path), len(tokens))
            if size and (path[: node.start] == tokens[: node.start]).all():
                same = path[:size] == tokens[:size]
                shared = size if same.all() else int(same.argmin())
                best = max(best, shared)
    return best


@pytest.mark.parametrize("max_unused_tokens", [0, 30, 10**6])
def test_random_requests(max_unused_tokens: int) -> None:
    play(300, max_unused_tokens, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("max_unused_tokens", [60, 500])
def test_ten_thousand_random_requests(max_unused_tokens: int) -> None:
    play(10_000, max_unused_tokens, seed=2)
