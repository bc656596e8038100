"""Every repair of AReaL, FSDP2, Ray and litellm; `registry` lists them."""
