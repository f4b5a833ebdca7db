"""The demonstration: a small model that learns while you watch."""
