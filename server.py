"""Serve a model over the OpenAI API: python server.py --config configs/default.json [--key value ...]"""

from __future__ import annotations

import sys

from cupyllm.api.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
