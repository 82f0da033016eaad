"""Languages of solutions in Python. A module per language is imported, in a solution's process only."""
