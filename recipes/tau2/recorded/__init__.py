"""Recorded episodes, and the token sequences that they become."""
