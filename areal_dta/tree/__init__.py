"""The prefix tree of a batch and its accounting. Needs numpy only."""

from areal_dta.tree.prefix_tree import PrefixTree, TreeNode

__all__ = ["PrefixTree", "TreeNode"]
