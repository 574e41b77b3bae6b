"""The deprecated worker classes, alive on Temper's engines."""
