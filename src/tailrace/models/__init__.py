"""Models in the formats of transformers: loading, routers of experts, export. Neither generation nor training."""
