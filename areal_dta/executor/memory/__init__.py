"""Memory of the executor: what blocks and paths take, and the budgets that fit."""
