"""Whom a policy talks to: interactions answer it turn by turn, and score each turn."""
