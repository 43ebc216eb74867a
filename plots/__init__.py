"""The figures of the report, drawn from results/ alone: one module a figure, listed in cli.py."""
