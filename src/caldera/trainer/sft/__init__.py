"""Supervised training: fine-tuning and its relatives, over the same worker groups as PPO."""
