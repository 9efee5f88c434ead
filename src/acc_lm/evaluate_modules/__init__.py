"""Local modules for the `evaluate` library, to be named by path: nothing is fetched, and nothing here imports them."""
