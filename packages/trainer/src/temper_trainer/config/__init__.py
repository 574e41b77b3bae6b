"""The settings of a run as frozen dataclasses, which hold the defaults; torch-free."""
