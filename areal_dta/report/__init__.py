"""What the user sees of a run: metrics.jsonl, a live table, the reward curve."""
