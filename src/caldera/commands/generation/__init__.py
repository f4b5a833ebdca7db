"""Answers to the prompts of a file: sampled here or by a server, and kept batch by batch."""
