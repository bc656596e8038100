"""The processes of a run: started, watched, kept on loopback, and reaped."""
