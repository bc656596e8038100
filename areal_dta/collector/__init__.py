"""Trajectories gathered into a prefix forest, batches planned, and rows dispatched."""
