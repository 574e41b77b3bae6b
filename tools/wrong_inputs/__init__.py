"""Try inputs that a new user gets wrong; `python -m tools.wrong_inputs --help`."""
