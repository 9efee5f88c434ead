"""Plans of a run before it starts: what fits into memory, how fast it is, what it sends and costs.

probe    bytes of a micro-batch, measured on the recipe's own model without its data
memory   memory of a process, from the probe and the layout of its launch
"""
