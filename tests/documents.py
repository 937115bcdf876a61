"""What users read: README, docs and the job files' README, and the commands and examples in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "slurm/README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path: path.read_text() for path in FILES}
TEXT = "\n".join(PAGES.values())


def commands(text=TEXT):
    """Return the commands of a text, between backticks or in blocks of bash, one for each line."""
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, flags=re.S)
        for line in block.splitlines()
        if line.strip()
    ]
    return [*dict.fromkeys([*re.findall(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)", text), *lines])]


def examples(text=TEXT):
    """Return (file, code) of each block of Python: the file that a page asks to put it into, else one of its own."""
    blocks = re.findall(r"((?:[^\n]+\n)*)\n*```python\n(.*?)```", text, flags=re.S)
    names = [re.search(r"(?i)put\s+this\s+into\s+`(\w+\.py)`", before) for before, _ in blocks]
    return [(name[1] if name else f"example_{n}.py", code) for n, (name, (_, code)) in enumerate(zip(names, blocks))]
