"""The gates, a module each."""
