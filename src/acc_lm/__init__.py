"""acc-lm: the recipe decides what is learned, the Accelerate config only where it runs."""
