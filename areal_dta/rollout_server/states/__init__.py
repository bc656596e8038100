"""Layers that carry a state from token to token, in the embedded server."""

from areal_dta.rollout_server.states.layers import state_layers
from areal_dta.rollout_server.states.rows import RowStates
from areal_dta.rollout_server.states.whole_prompts import WholePrompts

__all__ = ["RowStates", "WholePrompts", "state_layers"]
