"""The judge: gates, the runs that apply them, and their records and reports."""
