"""Several launches of one recipe, and the table that compares them: parity, scaling, bandwidth.

launching         launch train.py or a module, with a time limit and cleanup
tables            the line about the machine, and the generated block of a page
parity            one recipe on every backend, compared with the first
scaling           one recipe on increasing numbers of processes
measuring         the dry run of a plan, its cost next to the predicted one
scaling_plan      what the plan predicts for these launches
bandwidth         bandwidth between processes, and the communication of a step
bandwidth_worker  the process that measures it
"""
