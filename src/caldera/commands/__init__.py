"""The commands of `caldera` beside training: one module or package each."""
