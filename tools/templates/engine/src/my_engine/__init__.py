"""A Temper engine; import from its modules."""
