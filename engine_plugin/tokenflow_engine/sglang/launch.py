"""Start SGLang with the plugin: ``python -m tokenflow_engine.sglang.launch <arguments of sglang serve>``.

On a CPU it installs what the CPU path lacks and adds that path's defaults; elsewhere it changes nothing.
SGLang's child processes import this module again (multiprocessing's spawn), which is why the installation
stands at module level.
"""

from __future__ import annotations

import os
import sys

from tokenflow_engine.sglang import cpu_compat

__all__ = ["main"]

_CPU_MARK = "TOKENFLOW_CPU_COMPAT"
_CRASH_DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
"""SGLang's, on by default: each keeps clients of a dead engine waiting, five seconds at the least."""


def main(arguments: list[str]) -> None:
    """Run the server until it is stopped; `arguments` are SGLang's own."""
    for name in _CRASH_DIAGNOSTICS:
        os.environ.setdefault(name, "0")
    if cpu_compat.is_cpu_run(arguments):
        os.environ[_CPU_MARK] = "1"
        cpu_compat.install()
        arguments = cpu_compat.cpu_arguments(arguments)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
elif os.environ.get(_CPU_MARK) == "1":
    cpu_compat.install()
