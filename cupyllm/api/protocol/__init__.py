"""Bodies of requests and answers: shared.py for what both families have, chat.py, completions.py, beams.py."""
