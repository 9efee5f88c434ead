"""Rows of ids and targets, and which of them make up each step: packing, mixtures, streams, the loader.

    batch          a batch, and its copy to the device
    order          rows of each step, as a function of seed and step
    loader         micro-batches of a process, and the loader that reads them ahead
    text_rows      rows of plain text
    packing        rows packed from items, none of which attends to another
    mixture        rows of several sources, in exact shares
    streams        rows of text that is read while training
    stream_reader  the process that reads and encodes a stream

Nothing is imported here: `python -m acc_lm.rows.stream_reader` starts without torch.
"""
