"""Entry points that other libraries call: each translates its caller's arguments, calls `flashdecoding.api`,
translates back.

Nothing is imported here; import the module of the library that you use, such as
`flashdecoding.integrations.transformers`.
"""
