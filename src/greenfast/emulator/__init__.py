"""PTX on NumPy: a device for machines without a GPU."""
