"""`sage ablate`: a grid of whole training runs that differ in one thing, and what it shows."""
