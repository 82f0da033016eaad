"""Floor 1: inputs, number formats, reference arithmetic and error measures."""
