"""A training engine for Temper; import from its modules."""
