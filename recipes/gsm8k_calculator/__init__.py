"""A multi-turn agent that solves word problems with a calculator."""
