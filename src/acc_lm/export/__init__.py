"""`final/`: a model that transformers loads, with its tokenizer and a model card.

export       gather the weights, write the folder and the model card
exported     load an exported model, merge its adapter, generate a sample
"""
