"""Worker groups, samplers and servers as Ray actors. Only this folder imports Ray."""
