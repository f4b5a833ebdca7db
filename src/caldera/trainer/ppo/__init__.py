"""The PPO family's training loop, phase by phase."""
