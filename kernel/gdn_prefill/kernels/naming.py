"""Names for buffers that live in a namespace, in generated code and in the emulator's reports."""

from types import SimpleNamespace

from tvm.script.ir_builder import IRBuilder


def named(suffix: str = "", **buffers) -> SimpleNamespace:
    """A namespace of the buffers, each named as its field followed by `suffix`; None is kept."""
    for name, buffer in buffers.items():
        if buffer is not None:
            IRBuilder.name(name + suffix, buffer)
    return SimpleNamespace(**buffers)
