"""Terminal, trackers, speed and profile of a run.

console      start block, progress bar, closing block
rows         rows as text, in a terminal or as HTML
tracking     Weights & Biases, TensorBoard and others: every step exactly once, in order
speed        tokens and FLOP per second, and where the time of a step goes
profiler     traces of a few steps
trace        trace -> table of where the time of a step goes
"""
