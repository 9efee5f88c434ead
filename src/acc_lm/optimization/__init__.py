"""AdamW and Muon, their parameter groups, and the learning rate of each step.

optimizer    parameter groups and the optimizer of the recipe
muon         Muon for matrices, on every engine
schedule     learning rate as a function of the step
"""
