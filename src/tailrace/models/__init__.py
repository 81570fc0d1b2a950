"""Models in the formats of transformers: loading, heads, routers of experts, state dicts, export.

In: a model's name or a module. Out: modules, layouts, files. It must import neither generation nor training.
"""
