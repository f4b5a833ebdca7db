"""What a run will do and need, worked out before it starts."""
