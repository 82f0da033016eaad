"""PTX text as plain data: syntax, accepted forms, and a kernel as one body of code."""
