"""Watching the numbers of a run: skipped steps, and steps that are computed twice."""
