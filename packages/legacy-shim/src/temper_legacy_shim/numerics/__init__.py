"""The arithmetic of the older generation, quirks included, on padded tensors [B, W]; nothing outside this package calls it."""
