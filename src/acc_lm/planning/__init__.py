"""Plans of a run before it starts: what fits into memory, how fast it is, what it sends and costs.

probe          bytes of a micro-batch, measured on the recipe's own model without its data
memory         memory of a process, from the probe and the placement of its launch
plan           every config x micro-batch x checkpointing, what fits, and the one to take
advice         reasons for and against candidates, and ways out if nothing fits
plan_page      a plan as one page, with a slider for the number of GPUs
here           test of a launch against the memory of this machine
hardware       facts about GPUs, and reading `8xH100`
shapes         sizes of a model, its distribution over GPUs, and the work of a step
speed          seconds of a step by part
communication  bytes that a step sends, and the seconds that this takes
calibration    measured steps, kept on this machine
constants      efficiencies of the speed model, fitted on published figures; generated
closed_form    memory of Llama- and GPT-2-like models by formula, a second opinion
"""
