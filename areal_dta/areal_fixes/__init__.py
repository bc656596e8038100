"""Repairs of AReaL, FSDP2, Ray and litellm: one module per repair."""
