"""What is recorded: small seeded batches, and for each function the cases that matter."""
