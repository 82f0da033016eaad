"""The text of PTX as plain data: syntax, which forms are accepted, and a kernel as one body of code."""
