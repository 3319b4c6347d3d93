"""From documents to batches: tokenizer, preparation, token cache, block order, loaders."""
