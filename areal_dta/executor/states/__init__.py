"""Layers that carry a state from token to token, beside attention.

`kinds` finds them in a model; `protocol` says what such a layer is, and what a block
does for it; `run_tree` where states go in a block; `trunk_states` keeps those that
child fragments begin with.
"""
