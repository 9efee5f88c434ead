"""Held-out loss, samples during training, and scores of a finished model.

held_out     loss and accuracy, independent of batch size and number of processes
samples      greedy continuations at each evaluation
scoring      loss of any model on any text
completions  greedy answers to prompts, for metrics that compare text
metrics      modules for the evaluate library
benchmarks   tasks of the harness lm-eval
"""
