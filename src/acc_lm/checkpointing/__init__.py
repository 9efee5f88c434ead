"""Checkpoints: save, verify, rotate, and load them under any backend.

format       files and manifest of a checkpoint; find the newest, verify
saving       when and how a run saves, also in the background
writing      snapshot, one part per process, manifest, rename
rotation     which checkpoints to keep, and which is the best
loading      parts of any number of processes -> this engine's tensors
resuming     which checkpoint a run may resume from, and loading it
crash_points  named places at which a test can kill the process
"""
