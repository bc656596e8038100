"""Child processes that score episodes and hold large environments."""
