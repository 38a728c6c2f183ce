"""Bodies of requests and answers: shared.py for what both families have, chat.py and completions.py for the rest."""
