"""What a fair submission looks like: every call computes its result from what its inputs hold."""

from gdn_prefill import gdn_prefill_forward

__all__ = ["gdn_prefill_forward"]
