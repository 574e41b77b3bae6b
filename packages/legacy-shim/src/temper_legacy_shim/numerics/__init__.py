"""The old arithmetic, quirks included, on padded tensors [B, W]."""
