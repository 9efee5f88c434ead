"""Local modules for the `evaluate` library, to be named by path: nothing is fetched. `acc-lm evaluate` uses some of them."""
