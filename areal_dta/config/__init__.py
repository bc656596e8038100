"""Configuration: the schema, the options of engines and server, and its errors."""
