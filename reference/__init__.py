"""Float64 references that start from the raw gate, and adapters for other implementations."""
