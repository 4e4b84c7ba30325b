"""Floor 2: engines. One protocol over transformers, vLLM and any OpenAI-compatible server."""
