"""Names of the files and folders in a run's output folder; docs/reference/files.md describes them."""

RECIPE = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
PICTURE = "training_curves.png"
SUMMARY = "summary.json"
LOG = "train.log"
TRACKERS = "trackers"
FINAL = "final"
CHECKPOINTS = "checkpoints"
STATE, MANIFEST = "state.json", "manifest.json"
"""Files of a checkpoint, next to its tensors."""
STARTED_ON = (
    "strategy",
    "engine",
    "num_processes",
    "rows_in_parts",
    "layers_in_parts",
    "precision",
    "device",
    "threads",
)
"""Parts of the identity that may change with each start of a run, and that environment.json has for each."""
