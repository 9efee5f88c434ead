"""Files of a run that other programs read: metrics.jsonl, the curves, summary.json, environment.json.

names         names of all files in the output folder
metrics_file  metrics.jsonl: append, read
columns       metrics.jsonl as arrays by metric, read as it grows
differences   differences between the curves of two runs, and the tolerance of rounding
charts        lines, levels and marks of the charts of one or several runs
curves        training_curves.png
summary       summary.json: how a run ended
log_file      train.log: lines of the terminal, with time and rank
output_dir    the output folder of a run, locked for one run at a time
"""
