"""Accelerate's settings: read, corrected, completed with the keys that the recipe owns.

strategy      strategy and precision that the launch requests, and the bare model inside its wrappers
config_file   settings in Accelerate's yaml that Accelerate itself would silently ignore
grid          sizes of parallelism_config: copies, shards, parts of rows and of layers
fsdp          FSDP2 and HSDP: arguments for Accelerate
deepspeed     DeepSpeed: arguments for Accelerate, and its settings from the recipe
fp8           requirements of fp8 matmuls, and Accelerate's arguments for them
extensions    DeepSpeed's C++ extensions, built ahead of their use
"""
