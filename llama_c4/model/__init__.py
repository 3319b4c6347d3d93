"""The Llama model, its attention and loss paths, and its accounting."""
