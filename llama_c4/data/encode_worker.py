"""A process that turns documents into tokens until its input ends.

It speaks pickles over its standard input and output: first the encoder's settings, then batches of documents, one
answer each. The parent's death closes the input, however it died, so no such process outlives it for longer than a
batch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys

from llama_c4.config.errors import DataError
from llama_c4.data.tokenizer import DocumentEncoder


def main() -> None:
    """Serve batches; an answer is `("tokens", (tokens, ends))` or `("fault", message)` for a DataError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    source = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to the parent's standard error, not between the answers
    with contextlib.suppress(EOFError, pickle.UnpicklingError, BrokenPipeError):
        encoder = DocumentEncoder(pickle.load(source))
        while True:
            texts = pickle.load(source)
            try:
                answer: tuple[str, object] = ("tokens", encoder.encode(texts))
            except DataError as error:
                answer = ("fault", str(error))
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
    os._exit(0)  # an answer that nobody waits for is not flushed
