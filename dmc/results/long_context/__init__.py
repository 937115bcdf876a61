"""Long-context data sets as tasks of lm-eval: their YAML files, their documents, and their own scores."""
