"""Files of a run that other programs read: metrics.jsonl, the curves, summary.json, environment.json.

names         names of all files in the output folder
metrics_file  metrics.jsonl: append, read
curves        training_curves.png
summary       summary.json: how a run ended
output_dir    the output folder of a run, locked for one run at a time
"""
