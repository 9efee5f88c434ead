"""Observation of a run: other processes, memory, time and traffic of its steps, and its end.

peers         the other processes: same code and recipe, deaths, hangs
live_bytes    bytes of all tensors, counted as they come and go
gpus          memory, utilization and energy of every GPU, by NVML
memory        peak memory, a micro-batch that fits, remedies when there is not enough
step_timing   time spent waiting for data and for other processes, stragglers
exposed_communication  stalls of computation until other processes have sent something
step_cost     time, memory and bytes sent of a step, on every process
traffic       count of what a step communicates
bandwidth     measurements of what the processes can exchange
shutdown      clean end of the process group, causes of low-level errors
"""
