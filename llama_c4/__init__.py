"""llama_c4: a laboratory for the science of training small language models."""

__version__ = "0.1.0"
