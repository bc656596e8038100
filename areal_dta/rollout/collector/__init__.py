"""What is known of trajectories while they wait to be trained on."""
