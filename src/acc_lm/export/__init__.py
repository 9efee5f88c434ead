"""`final/`: a model that transformers loads, with its tokenizer and a model card.

export       gather the weights, write the folder
card         the model card, with what the Hub reads
hub          push a folder to the Hub
exported     load an exported model, merge its adapter, generate a sample
gguf         write a GGUF file with the converter of llama.cpp
"""
