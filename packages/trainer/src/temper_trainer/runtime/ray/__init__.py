"""Roles, samplers and servers as Ray actors. Ray is imported only here."""
