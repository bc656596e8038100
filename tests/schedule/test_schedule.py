import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.schedule import StepKind, build_schedule
from areal_dta.tree import PrefixTree
from tests.builders import batches, every_token, make_tree

# a, then two forks of two leaves each: cut into 4-token blocks
TREE = make_tree("aabbccc", "aabbddd", "aaeefff", "aaeeggg")


def plan(tree, block_tokens, retain_tokens=None, training=True):
    return build_schedule(
        tree, block_tokens, retain_tokens, training, every_token(tree)
    )


def summary(schedule):
    return [
        (s.kind.value, s.fragment, s.num_tokens, s.with_grad) for s in schedule.steps
    ]


def test_retaining_everything_runs_each_token_once():
    schedule = plan(TREE, 5, retain_tokens=None)
    assert schedule.num_forward_tokens == TREE.num_tree_tokens == 18
    assert schedule.num_recomputed_tokens == 0
    assert schedule.num_backward_tokens == 18
    assert all(s.with_grad for s in schedule.steps if s.computes)


def test_recomputing_enters_on_the_trunk_alone():
    schedule = plan(TREE, 5, retain_tokens=0)
    enters = [s for s in schedule.steps if s.kind is StepKind.ENTER]
    assert enters and not any(s.with_grad for s in enters)
    for step in enters:
        assert step.computes == schedule.cut.fragments[step.fragment].trunk
    recomputed = sum(s.num_tokens for s in enters)
    assert schedule.num_recomputed_tokens == recomputed
    assert schedule.num_forward_tokens == 18 + recomputed
    assert schedule.peak_graph_tokens <= 5


def test_a_leaf_fragment_only_exits():
    assert summary(plan(make_tree("abc"), 8, 0)) == [("exit", 0, 3, True)]
    assert summary(plan(make_tree("abcdef"), 3, 0)) == [
        ("enter", 0, 3, False),
        ("exit", 1, 3, True),
        ("exit", 0, 3, True),
    ]
    assert summary(plan(make_tree("abcdef"), 3, 6)) == [
        ("enter", 0, 3, True),
        ("exit", 1, 3, True),
        ("exit", 0, 0, False),
    ]


def test_forward_only_keeps_no_graph_and_computes_once():
    schedule = plan(TREE, 5, training=False)
    assert schedule.num_forward_tokens == 18
    assert schedule.num_backward_tokens == schedule.peak_graph_tokens == 0
    assert not any(s.with_grad for s in schedule.steps)


def test_negative_retain_tokens_is_refused():
    with pytest.raises(ValueError, match="retain_tokens=-1"):
        plan(TREE, 4, -1)


@settings(max_examples=150, deadline=None)
@given(
    batches(10, 12),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(0, 20)),
    st.booleans(),
)
def test_steps_nest_and_budgets_hold(batch, block_tokens, retain_tokens, training):
    tree = PrefixTree.from_sequences(batch)
    schedule = plan(tree, block_tokens, retain_tokens, training)
    fragments = schedule.cut.fragments
    open_fragments: list[int] = []
    left = set()
    for step in schedule.steps:
        f = fragments[step.fragment]
        if step.kind is StepKind.ENTER:
            assert f.parent == (open_fragments[-1] if open_fragments else -1)
            open_fragments.append(f.index)
        elif f.children:
            assert open_fragments.pop() == f.index and set(f.children) <= left
            left.add(f.index)
        else:
            assert f.parent == (open_fragments[-1] if open_fragments else -1)
            left.add(f.index)
    assert len(left) == len(fragments) and not open_fragments
    assert schedule.num_forward_tokens == (
        tree.num_tree_tokens + schedule.num_recomputed_tokens
    )
    if training and retain_tokens is not None:
        limit = max(retain_tokens, block_tokens)
        assert schedule.peak_graph_tokens <= limit


def test_kept_tokens_follow_the_path_not_the_branches():
    def peak(num_branches: int) -> int:
        trunk = list(range(100))
        batch = [trunk + [1000 + b] * 20 for b in range(num_branches)]
        tree = PrefixTree.from_sequences(batch)
        return build_schedule(tree, 40, 0).peak_kv_tokens

    assert peak(16) == peak(256)


def test_side_branches_of_a_trunk_are_not_kept():
    # each turn hangs one dead branch off the trunk (dropped thinking)
    trunk = list(range(10, 210))
    batch = [trunk[:k] + [1000 + k] * 9 for k in range(20, 200, 20)] + [trunk]
    tree = PrefixTree.from_sequences(batch)
    schedule = build_schedule(tree, 50, 0)
    assert schedule.peak_kv_tokens <= 2 * len(trunk)
    entered = [s for s in schedule.steps if s.kind is StepKind.ENTER]
    assert sum(s.num_tokens for s in entered) <= len(trunk)
