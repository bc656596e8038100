"""Prefix tree of a batch, its accounting, and the forest of waiting sequences; numpy.

* ``prefix_tree``: nodes, paths and tokens of one batch.
* ``leaf_order``: lengths and common prefixes alone, which is all that balancing needs.
* ``prefix_forest``: sequences that wait, with cheap insertion and removal.
"""

from areal_dta.tree.leaf_order import LeafOrder
from areal_dta.tree.prefix_tree import PrefixTree, TreeNode

__all__ = ["LeafOrder", "PrefixTree", "TreeNode"]
