"""The OpenAI API over HTTP: Starlette routes around one engine thread. app.py puts it together."""
