"""Rules shared by element-wise stores and tile operations."""

from __future__ import annotations

from .memory import Tile
from .role import Role


def leave_to_leader(role: Role, tile: Tile) -> bool:
    """Code that all threads run: the first role stores to shared and global tiles, the others only
    to their own.
    """
    return not role.leader and (tile.is_global or tile.scope.startswith("shared"))
