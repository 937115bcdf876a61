"""Audit caches: python scripts/audit.py 'models={base: DIR, cr8: DIR}' claim='cr8 within 3 points of full at recall'.

It ends non-zero where a claim is false, not carried by its samples, or of a CR that was not held, or where nothing was
compressed.
"""

from __future__ import annotations

import sys
from typing import Any

from hydra_command import CONFIGS, command


@command("audit", on_devices=True)
def main(settings: Any) -> None:
    from dmc.commands.audit import AuditConfig, run_audit
    from dmc.config import build_config

    sys.exit(run_audit(build_config(AuditConfig, settings), CONFIGS))


if __name__ == "__main__":
    main()
