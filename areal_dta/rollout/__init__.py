"""Rollout side: inference backends and what happens to trajectories as they arrive."""
