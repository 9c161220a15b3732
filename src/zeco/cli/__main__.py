"""``python -m zeco.cli``: what ``torchrun -m zeco.cli`` runs as each rank."""

from __future__ import annotations

import sys

from zeco.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
