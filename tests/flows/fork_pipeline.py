"""The `pipeline` command in forks of a process that has already imported what it needs: a kill costs no new import.

Reads lines from stdin: `start LOG JSON-LIST-OF-ARGUMENTS` forks and prints the child's pid; `wait PID` waits for the
end of a child and prints its exit code, negative when a signal ended it.
"""

from __future__ import annotations

import json
import os
import sys


def _load() -> None:
    """Import what a run of FAC Synthesis imports, except Prefect, which reads its settings when it is imported."""
    import polars
    import pyarrow.parquet
    import torch
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401 - loaded for its effect

    import headwater.data_cards.report
    import headwater.flows.fac_card
    import headwater.flows.fac_report
    import headwater.flows.fac_synthesis
    import headwater.llm.transformers
    import headwater.pipelines.run
    import headwater.pipelines.summary
    import headwater.sae.architectures
    import headwater.sae.train
    import headwater.stages.row_runner  # noqa: F401 - loaded for its effect

    polars.Series([0])
    pyarrow.array([0])
    torch.set_num_threads(1)  # a pool of threads would not survive the fork


def _run(log: str, arguments: list[str]) -> int:
    from headwater.pipelines.cli import main

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (0, 1, 2):
        os.dup2(handle, stream)
    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _serve() -> None:
    _load()
    for line in sys.stdin:
        verb, rest = line.split(maxsplit=1)
        if verb == "start":
            log, arguments = rest.split(maxsplit=1)
            pid = os.fork()
            if pid == 0:
                os._exit(_run(log, json.loads(arguments)))
            print(pid, flush=True)
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(int(rest), 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
