"""Files and datasets, their documents, and the tokenizer.

corpus       the source of a recipe -> documents, training and held out
locations    paths, globs, folders and remote addresses -> files on this machine
opening      files opened for reading, compressed ones too
files        txt, JSON lines, JSON, CSV, Parquet, Arrow -> records, each with its place for error messages
stretches    files cut into stretches, which several processes read at once
contents     hashes of the contents of files, with a memo of them
documents    documents, and the corpus that they form
synthetic    synthetic text with a known entropy
splitting    training and held-out documents, split by content
parts        documents encoded part by part, by several processes if requested
writing      ids of plain text on disk
encoder      plain text -> ids, by tiktoken where it is exact
tokenizer    load or train a tokenizer, encode documents
"""
