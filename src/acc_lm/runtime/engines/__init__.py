"""The engines: a model distributed over processes, its gradients, and the parts that each process holds.

prepare       model and optimizer -> distributed over the processes by the engine that the launch requests
shards        parts of each tensor on this process, for checkpoints and exports of every engine
rectangles    consecutive elements of some columns of a tensor, as blocks
tensor_parallel  layers in parts: a model cut by its plan in transformers
gradients     norm and clipping of the gradients, names of the non-finite ones
identity      strategy, engine, placement and precision, read from the live objects
collectives   work of the main process for all, gathered objects, process groups on the CPU
"""
