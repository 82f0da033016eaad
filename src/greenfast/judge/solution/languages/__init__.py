"""Languages whose solutions are Python code. Imported in a solution's process only, a module per language."""
