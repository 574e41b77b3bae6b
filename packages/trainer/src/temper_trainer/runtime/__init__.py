"""Runtimes of the roles: the driver's process, or Ray actors."""
