"""Processes: groups, devices, warnings."""
