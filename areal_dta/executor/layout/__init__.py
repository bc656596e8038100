"""Where everything of a tree and its blocks lies, and how the device learns of it."""
