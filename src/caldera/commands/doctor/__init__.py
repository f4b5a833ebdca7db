"""What of a machine works for Caldera, and how to mend the rest."""
