"""How the package's kernels are lowered where TileLang's defaults are not wanted."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

# A pass config of ours: the kernel places its own fences between the generic and the async proxy.
# TileLang puts one before every WGMMA that may follow a store to shared memory, whatever that store
# is for; on a serial chain each costs about a hundred cycles.
OWN_PROXY_FENCES = "gdn.own_proxy_fences"

_LOCK = threading.RLock()


@contextlib.contextmanager
def lowering(pass_configs: Mapping[Any, Any] | None) -> Iterator[dict[Any, Any]]:
    """The pass configs for TileLang, while the passes are set up as `pass_configs` asks.

    Kernels with and without OWN_PROXY_FENCES need different names: TileLang's compile cache cannot
    tell them apart otherwise.
    """
    configs = dict(pass_configs or {})
    if not configs.pop(OWN_PROXY_FENCES, False):
        yield configs
        return
    import tilelang

    with _LOCK:
        injecting = tilelang.cuda.transform.InjectFenceProxy
        tilelang.cuda.transform.InjectFenceProxy = lambda: lambda module: module
        try:
            yield configs
        finally:
            tilelang.cuda.transform.InjectFenceProxy = injecting
