"""What SGLang's CPU path needs that its published wheels do not bring. Nothing installed is edited.

Called at import of the launcher's main module, so that it also holds in the spawned child processes, which
import that module again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

__all__ = ["cpu_arguments", "install", "is_cpu_run"]

_CPU_DEFAULTS = {
    "--device": ["cpu"],
    "--attention-backend": ["torch_native"],
    "--sleep-on-idle": [],  # an idle scheduler otherwise keeps one core busy; the link wakes it
}
_CPU_HICACHE = "--enable-hierarchical-cache"
_CPU_HICACHE_DEFAULTS = {
    "--hicache-io-backend": ["direct"],
    "--hicache-mem-layout": ["layer_first"],
}
"""What `cpu_hicache` provides for."""
_MISSING_SCHEMA = "operator torchvision::nms does not exist"
_NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def is_cpu_run(arguments: list[str]) -> bool:
    """Whether these launch arguments, on this machine, mean a CPU: asked for, or nothing else there."""
    for i, argument in enumerate(arguments):
        if argument == "--device":
            return arguments[i + 1 : i + 2] == ["cpu"]
        if argument.startswith("--device="):
            return argument == "--device=cpu"
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not _has_cuda()


def cpu_arguments(arguments: list[str]) -> list[str]:
    """The arguments with the CPU path's defaults added where the person said nothing."""
    given = {argument.partition("=")[0] for argument in arguments}
    defaults = _CPU_DEFAULTS | (_CPU_HICACHE_DEFAULTS if _CPU_HICACHE in given else {})
    extra = [[name, *value] for name, value in defaults.items() if name not in given]
    return [*arguments, *(word for words in extra for word in words)]


def install() -> None:
    """Make `sgl_kernel` and `torchvision` importable on a CPU. Idempotent."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    _stand_in_for_sgl_kernel()
    _import_torchvision()


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _stand_in_for_sgl_kernel() -> None:
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return
    stand_in = importlib.import_module("tokenflow_engine.sglang.cpu_kernels")
    sys.modules["sgl_kernel"] = sys.modules["sgl_kernel.mamba"] = stand_in


def _import_torchvision() -> None:
    """Import torchvision; where its compiled half is a CUDA build, declare the two schemas it would bring."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING_SCHEMA not in str(error):
            raise
        _declare_torchvision_ops()
        importlib.import_module("torchvision")


def _declare_torchvision_ops() -> None:
    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{op}", _NMS_SCHEMA)
