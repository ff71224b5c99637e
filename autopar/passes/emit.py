"""emit: from the rewritten program to a module that trains."""

from __future__ import annotations
