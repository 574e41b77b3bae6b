"""Work between processes: process groups and their store, gathers of values, failures of ranks."""
