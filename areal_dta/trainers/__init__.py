"""What our trainers add to AReaL's: processes watched, rollouts collected, recovery."""
