"""Records and the views of them: JSONL, terminal, W&B."""
