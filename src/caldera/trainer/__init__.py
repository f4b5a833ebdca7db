"""The training loops and their entry points."""
