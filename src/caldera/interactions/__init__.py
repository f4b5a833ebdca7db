"""Interactions: environments that respond to a policy turn by turn, and score each turn."""
