"""The place of the help for users of older worker-class systems; it has no API yet."""
