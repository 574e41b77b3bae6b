"""Files that a released version wrote, kept so that every later version is tried with them."""
