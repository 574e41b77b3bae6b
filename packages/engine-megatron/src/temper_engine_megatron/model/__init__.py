"""The model: decoder, attention, router and head."""
