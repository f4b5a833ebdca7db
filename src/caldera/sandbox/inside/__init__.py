"""What runs inside the sandbox. Standard library only: it is sent there as text."""
