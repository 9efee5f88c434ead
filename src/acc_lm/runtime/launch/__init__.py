"""The launch: environment of the launcher -> Accelerator, or an error with the reason.

accelerator   the Accelerator that the launch requests
request       strategy, precision and plugins, read from the environment and checked against the recipe
ranks         world size, backend and machine of every process
layout       bytes of a parameter on each device under an Accelerate config, for plans
threads       threads of a process on a CPU, by a trial
refusals      launches and recipes that would hang, crash or silently train something else
rendezvous    port and store by which the processes find each other
doctor        description of this machine, and whether a config can run on it
"""
