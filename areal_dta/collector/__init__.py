"""Collection of rollout results, planning of batches, and dispatch to ranks."""
