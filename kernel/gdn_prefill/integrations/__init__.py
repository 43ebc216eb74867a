"""Adapters that put the operator behind the interfaces of other packages."""
