"""Find what an older system left in a folder, and plan and carry out its migration."""
