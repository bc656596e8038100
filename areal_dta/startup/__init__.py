"""From files and overrides to a checked job, before anything heavy starts."""
