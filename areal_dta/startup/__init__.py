"""Turn files and overrides into a checked job, before anything heavy starts."""
