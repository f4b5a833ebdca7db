"""Policy losses; `base` has the contract that all of them follow."""
