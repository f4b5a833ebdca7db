"""Policy losses, by family; `base` has the contract that all of them follow."""
