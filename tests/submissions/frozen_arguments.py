"""Remembers the tensors of its first call and looks at no later ones, like a careless graph."""

from gdn_prefill import gdn_prefill_forward as compute

_arguments = []


def gdn_prefill_forward(*tensors):
    if not _arguments:
        _arguments.extend(tensors)
    return compute(*_arguments)
