"""Floor 5: run the gates on a task, store and compare what they found."""
