"""Scoring a file of answers: how good they are, how sure that is, and which of two is better."""
