"""python -m gdn_ladder: the version table as text."""

from .versions import VERSIONS


def table() -> str:
    """One line a version: name, family, what is expected, and the idea; its settings below."""
    lines = []
    for version in VERSIONS:
        family = version.family.name if version.family is not None else "not built"
        lines.append(f"{version.name:<15} {family:<15} {version.expected:<4} {version.idea}")
        lines += [f"{'':<37}{text}" for text in (version.settings_text(), version.reason) if text]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
