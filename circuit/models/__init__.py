"""Loading of targets: configuration, weights and tokenizer of a checkpoint."""
