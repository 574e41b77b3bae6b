"""Teachers of on-policy distillation as their clients see them: questions, answers, routes, token maps. Nothing here runs a model."""
