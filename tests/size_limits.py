"""Fails if a function has more than 80 lines or a module more than 500.

python tests/size_limits.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hybridflow", "benchmarks", "requirements", "tests")
FUNCTION_LINES, MODULE_LINES = 80, 500


def too_long(path: Path) -> Iterator[str]:
    """One message per function and module of the file that is over its limit."""
    name, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > MODULE_LINES:
        yield f"{name}: {lines} lines; a module has at most {MODULE_LINES}. Split it by concern."
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines; a function has at most {FUNCTION_LINES}."


def main() -> int:
    """Prints what is too long; 1 if anything is."""
    found = [
        message for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) for message in too_long(path)
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
