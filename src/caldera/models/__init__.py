"""Model building blocks that engines and rollouts share."""
