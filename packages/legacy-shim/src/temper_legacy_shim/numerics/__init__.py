"""The arithmetic of the older generation, quirks included, on padded tensors [B, W].

Nothing outside this package calls it.
"""
