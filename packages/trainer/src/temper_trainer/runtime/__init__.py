"""Where the roles run: in the driver's process, or as Ray actors."""
