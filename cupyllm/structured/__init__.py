"""Output that follows a JSON schema, a regular expression, a list of choices or a grammar, whatever the model says.

grammar.py      what is asked for -> the text of a grammar
json_schema.py  which schemas are accepted
compiler.py     grammar -> Guide; the one place that uses the library llguidance (extra `structured`)
tool_calls.py   tools -> the grammar of calls of them
"""
