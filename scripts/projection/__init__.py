"""Parts of the GPU projection: a record of what runs, and seconds for it."""
