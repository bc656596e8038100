"""The prefix tree of a batch and its accounting. Needs numpy only."""

from areal_dta.tree.leaf_order import LeafOrder
from areal_dta.tree.prefix_tree import PrefixTree, TreeNode

__all__ = ["LeafOrder", "PrefixTree", "TreeNode"]
