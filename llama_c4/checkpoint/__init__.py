"""Files of a run: states, run folders, conversion to and from Hugging Face."""
