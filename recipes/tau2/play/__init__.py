"""Play episodes: the agent, its policies, the simulated users, and the loop."""
