"""The commands of `caldera`, one module or package each; the trainings live in `caldera.trainer`."""
