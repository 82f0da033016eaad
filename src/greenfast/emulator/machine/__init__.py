"""The state of some blocks of a grid while they run: memories, barriers, orders, races and counts."""
