"""The model: build or load it, fused loss, attention within documents, adapters, mixtures of experts, FLOP.

build        config -> model that returns its loss
pretrained   configs and weights from a folder or the Hub
loss_head    a model's own head, replaced by the fused loss
fake         the model on fake tensors: any size, without data
checks       trial runs before training: causal, and packed rows have the gradient of separate ones
losses       logits and cross-entropy in chunks
attention    masks of rows that hold several documents
row_parts    rows that several processes share, and attention over them
vocabulary_parts  an embedding and a head whose ids several processes share
vocabulary   rows of the embeddings and the head for new tokens
adapter      LoRA and QLoRA
router       load-balancing loss of a mixture of experts
experts      grouped matrix products under autocast
activations  selective checkpointing
flops        FLOP per token, and the peak of a device
"""
