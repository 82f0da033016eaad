"""Instructions as operations on the state of the resident blocks."""
