"""What instructions do: each as an operation on the state of some blocks."""
