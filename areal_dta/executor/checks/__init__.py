"""Checks of a model by its behaviour: what its attention asks for, and a tiny tree."""
