"""The folder that an engine's own Python gets as its path: nothing else of Caldera is there."""
