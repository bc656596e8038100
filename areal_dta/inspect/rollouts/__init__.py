"""Files of rollouts, read one sequence at a time."""
