"""Adapters for other implementations of the operator; none of them is imported until it is used."""
