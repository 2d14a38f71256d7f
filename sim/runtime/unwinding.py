"""Out of memory as PyTorch unwinds it: what C++ held dies at once, Python's frames live as long as the traceback.

TAPE.md 2.8. Much of what is Python here is C++ in PyTorch (operators, the engine, the dispatcher); wrappers, hooks,
modules and the script are Python in both.
"""

from __future__ import annotations

from types import FrameType, TracebackType

_COMPILED = ("sim.runtime.ops.", "sim.runtime.autograd", "sim.runtime.tape", "sim.model.calls")
_BUILTINS = ("linear", "conv1d_linear", "gelu", "bmm", "attention")
"""Functions of torch.nn.functional that have no Python frame."""


def unwind(traceback: TracebackType | None) -> None:
    """Clear the locals of the traceback's finished frames that have no Python frame in PyTorch."""
    while traceback is not None:
        frame = traceback.tb_frame
        if _compiled(frame):
            frame.clear()
        traceback = traceback.tb_next


def _compiled(frame: FrameType) -> bool:
    module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if module == "sim.model.functional":
        return function in _BUILTINS
    if module == "sim.runtime.tape" and function == "backward":
        return False  # torch.autograd.backward holds the root gradient
    return module.startswith(_COMPILED)
