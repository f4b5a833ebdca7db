"""The files inside the sandbox. Standard library only: they are sent there as text."""
