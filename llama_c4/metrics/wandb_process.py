"""The process that speaks to Weights & Biases; `wandb_sink` starts it and feeds it. The only importer of wandb.

A process of its own, because wandb in the run's process would patch standard output, raise from `log` once its service
is gone, block for minutes on a network that does not answer, and hold the interpreter at its exit.

Standard input: JSON lines; first the arguments of the run, then records {"step": …, "values": {…}}, then
{"exit_code": …}. When the input ends without one, the run was killed. Standard output: one JSON line,
{"done": true} or {"failed": "why"}. Needs nothing of llama_c4, so it starts fast.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any

INIT_SECONDS = 20
"""How long wandb may take to answer."""
FAREWELL_SECONDS = 60
"""How long this process may outlive the run."""
EXIT_CODE_OF_THE_KILLED = 1


def start_run(arguments: Mapping[str, Any]) -> Any:
    """Begin or continue a run of W&B.

    Args:
        arguments: dir, run_id, mode, project, entity, group, tags, name, config.
    """
    import wandb

    run = wandb.init(
        id=arguments["run_id"],
        resume="allow",
        mode=arguments["mode"],
        dir=arguments["dir"],
        project=arguments["project"],
        entity=arguments["entity"],
        group=arguments["group"],
        tags=arguments["tags"],
        name=arguments["name"],
        config=arguments["config"],
        allow_val_change=True,
        save_code=False,
        settings=wandb.Settings(
            console="off",
            silent=True,
            init_timeout=INIT_SECONDS,
            # The default of 15 seconds loses as many when everything is killed at once.
            x_transaction_log_flush_interval=1,
            x_disable_meta=True,
            x_disable_stats=True,
            disable_git=True,
        ),
    )
    run.define_metric("*", step_metric="global_step")
    return run


def serve(lines: queue.Queue[str | None]) -> None:
    """Log every line to one run until the input ends."""
    run = start_run(json.loads(lines.get() or "{}"))
    exit_code = EXIT_CODE_OF_THE_KILLED
    while (line := lines.get()) is not None:
        item = json.loads(line)
        if "exit_code" in item:
            exit_code = item["exit_code"]
        else:
            run.log(item["values"], step=item["step"])
    run.finish(exit_code=exit_code)


def drain(lines: queue.Queue[str | None]) -> None:
    """Empty the pipe at once, so that the run never waits for W&B; when it ends, set an end to this process too."""
    for line in sys.stdin:
        lines.put(line)
    watchdog = threading.Timer(FAREWELL_SECONDS, os._exit, args=(1,))
    watchdog.daemon = True
    watchdog.start()
    lines.put(None)


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # what wandb prints is for nobody
        os.dup2(null, descriptor)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=drain, args=(lines,), daemon=True).start()
    outcome: dict[str, Any] = {"done": True}
    try:
        serve(lines)
    except ImportError:
        outcome = {"failed": "wandb is not installed (pip install 'llama-c4[wandb]')"}
    # Whatever it is, it is W&B's and not the run's: wandb raises its own errors, those of sockets, of json, ….
    except Exception as error:
        outcome = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps(outcome), file=answer, flush=True)
    # Past wandb's exit hooks, which wait for a service that may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
