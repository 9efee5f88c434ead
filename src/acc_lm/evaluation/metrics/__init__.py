"""Local modules for the `evaluate` library, loaded by path without a download; `acc-lm evaluate` uses some of them."""
