"""What our trainers add to AReaL's: engines, watched processes, a record per step."""
