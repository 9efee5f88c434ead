"""The plan of a run: hardware, speed and memory of each way to launch it, before anything is launched.

hardware     facts about GPUs, and reading `8xH100`
speed        seconds of a step by part, and bytes that it sends
constants    efficiencies of the speed model, fitted on published figures; generated
closed_form  memory of Llama- and GPT-2-like models by formula, a second opinion
"""
