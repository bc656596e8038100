"""Rollout backend `local`: an embedded inference server that needs no GPU.

It speaks the part of SGLang's HTTP protocol that AReaL's own client uses and generates
with Transformers. Read `protocol.py` (what is said), `app.py` (the endpoints),
`generation.py` (how tokens are made), `generation_thread.py` (who makes them),
`server.py` (the process) and `areal_backend.py` (how AReaL starts it).

Nothing is imported here: the server process does without AReaL, which takes seconds to
import.
"""
